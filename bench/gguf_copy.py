"""The weights under test as a GGUF file for llama.cpp: in float32, the very same numbers, or in fewer bits."""

from pathlib import Path

import numpy as np

from bench.models import Subject
from ferrum_jax.config import ModelConfig
from ferrum_jax.models.specs import named_leaves


def write(subject: Subject, path: Path, kept: str = "F32") -> None:
    """Writes a model of the Llama family, its matrices as GGML's type `kept`; of the vocabulary only the size.

    llama.cpp turns neighbouring pairs of a head where Hugging Face turns halves, so the rows of q and k change places,
    as in llama.cpp's own `convert_hf_to_gguf.py`.

    Raises:
        NotImplementedError: another family, a RoPE scaling or a window.
    """
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants

    cfg = subject.config
    if cfg.model_type != "llama" or cfg.rope_scaling is not None or any(cfg.layer_windows):
        raise NotImplementedError(f"{subject.name}: only Llama without RoPE scaling is written, not {cfg.model_type}")
    writer = GGUFWriter(path, "llama")
    writer.add_name(subject.name)
    for key, value in _counts(cfg).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_rope_freq_base(cfg.rope_theta)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    kind = GGMLQuantizationType[kept]
    writer.add_tokenizer_model("none")
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, cfg.num_hidden_layers)
    heads = {"q_proj": cfg.num_attention_heads, "k_proj": cfg.num_key_value_heads}
    for name, leaf in named_leaves(subject.params).items():
        module = name.split(".")[-2]
        values = np.asarray(leaf, np.float32)
        if module in heads:
            values = _interleave(values, heads[module])
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, f"a parameter of no known name: {name}"
        own = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name, quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _counts(cfg: ModelConfig) -> dict[str, int]:
    return {
        "vocab_size": cfg.vocab_size,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "block_count": cfg.num_hidden_layers,
        "feed_forward_length": cfg.intermediate_size,
        "attention.head_count": cfg.num_attention_heads,
        "attention.head_count_kv": cfg.num_key_value_heads,
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.head_dim,
        "rope.dimension_count": cfg.head_dim,
    }


def _interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])  # [heads, 2, H/2, ...]
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
