"""Attention whose keys and values are made of a latent (DeepSeek)."""

from dataclasses import dataclass

from ferrum_jax.config.numbers import refuse_no_count
from ferrum_jax.contract.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of multi-head latent attention, in Hugging Face's names."""

    q_lora_rank: int | None = None  # of the latent that queries are made of; they are made of x itself if None
    kv_lora_rank: int  # of the latent of keys and values, which is what the KV holds
    qk_nope_head_dim: int  # of a head, what does not turn
    qk_rope_head_dim: int  # what turns; its key is one for all heads, and in the KV beside the latent
    v_head_dim: int
    rope_interleave: bool = True  # pairs that turn lie side by side in the checkpoint, not half a head apart

    def __post_init__(self):
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            refuse_no_count(name, getattr(self, name), 1)
        if self.q_lora_rank is not None:
            refuse_no_count("q_lora_rank", self.q_lora_rank, 1)
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim is {self.qk_rope_head_dim}, rotary embeddings need an even one")

    @property
    def cached_dim(self) -> int:
        """Numbers that the KV holds for a position of a layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim
