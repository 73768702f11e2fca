"""Parts of a model's configuration: the scaling of rotary embeddings, experts, and latent attention."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from ferrum_jax.config.checks import check_integer, check_number
from ferrum_jax.contract.checks import check_flag
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, safe_repr

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
ROPE_FACTORS = ("short_factor", "long_factor")


def check_fields(config: Any, of: str = "", signed: Collection[str] = ()) -> None:
    """Raises ConfigError unless the fields of a dataclass have their types.

    Integers must be at least 1, and numbers positive unless `signed`. Messages name a field by its name and `of`.
    """
    for field in fields(config):
        value: Any = getattr(config, field.name)
        name = f"{field.name}{of}"
        kinds: tuple[Any, ...] = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        if value is None and NoneType in kinds:
            continue
        if int in kinds:
            check_integer(name, value, 1)
        elif float in kinds:
            check_number(name, value, above=None if field.name in signed else 0.0)
        elif bool in kinds:
            object.__setattr__(config, field.name, check_flag(name, value, ConfigError))
        elif not isinstance(value, known := get_origin(kinds[0]) or kinds[0]):
            raise ConfigError(f"{name} is {safe_repr(value)}, expected a {known.__name__}")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A scaling of rotary frequencies; fields are Hugging Face's, and None if the type does not use them."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None  # positions
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None  # for longrope: divisors of the pairs' frequencies
    long_factor: tuple[float, ...] | None = None  # the same for sequences longer than the original length
    is_long: bool = False  # for longrope: all sequences use the long factors

    def __post_init__(self):
        if not isinstance(self.rope_type, str) or self.rope_type not in ROPE_TYPES:
            raise UnsupportedError(f"rope_type {safe_repr(self.rope_type)}: supported are {', '.join(ROPE_TYPES)}")
        check_fields(self, " of the RoPE scaling", signed=("attention_factor", "mscale", "mscale_all_dim"))
        if self.rope_type == "llama3" and not (self.low_freq_factor or 0) < (self.high_freq_factor or 0):
            raise ConfigError(
                f"high_freq_factor of the RoPE scaling is {self.high_freq_factor}, expected more than "
                f"low_freq_factor, {self.low_freq_factor}"
            )
        if self.rope_type == "longrope":
            for name in ROPE_FACTORS:
                if not isinstance(divisors := getattr(self, name), tuple):
                    raise ConfigError(f"{name} of the RoPE scaling is {safe_repr(divisors)}, expected a tuple")
                for divisor in divisors:
                    check_number(f"{name} of the RoPE scaling", divisor)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts, in Hugging Face's names."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # of one expert
    norm_topk_prob: bool  # a token's shares of its experts are renormalised to sum to one
    shared_expert_intermediate_size: int | None = None  # of the expert that runs for every token
    sparse_layers: tuple[bool, ...]  # True for layers with experts; the others have a dense feed-forward block
    scoring_func: str = "softmax"  # or "sigmoid", with a learnt bias that affects only the choice
    n_group: int = 1  # number of groups of experts
    topk_group: int = 1  # number of groups that a token chooses first
    routed_scaling_factor: float = 1.0  # multiplies all shares
    swiglu_limit: float | None = None  # bound of gate and up in a clamped SwiGLU; None: plain SwiGLU
    swiglu_alpha: float = 1.702  # of the sigmoid in it

    def __post_init__(self):
        check_fields(self)
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(f"a token cannot choose {self.num_experts_per_tok} of {self.num_experts} experts")
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise ConfigError(
                f"{self.topk_group} of {self.n_group} groups of {self.num_experts} experts cannot be chosen"
            )
        if self.num_experts_per_tok > self.num_experts // self.n_group * self.topk_group:
            raise ConfigError(f"{self.topk_group} groups have fewer than {self.num_experts_per_tok} experts")
        if not any(is_sparse is True for is_sparse in self.sparse_layers):
            raise ConfigError(f"sparse_layers is {safe_repr(self.sparse_layers)}, expected one true at least")


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek), in Hugging Face's names."""

    q_lora_rank: int | None = None  # of the queries' latent; None: queries are projected from x itself
    kv_lora_rank: int  # of the latent of keys and values, which the KV holds
    qk_nope_head_dim: int  # width of the part of a head that is not rotated
    qk_rope_head_dim: int  # width of the rotated part; all heads share its key, which the KV holds, too
    v_head_dim: int
    rope_interleave: bool = True  # rotated pairs are adjacent in the checkpoint, not half a head apart

    def __post_init__(self):
        check_fields(self)
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim is {self.qk_rope_head_dim}, rotary embeddings need an even one")

    @property
    def cached_dim(self) -> int:
        """How many numbers the KV holds for each position of a layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim
