"""Weights as compressed-tensors packs them and in MXFP4, read as those who made the formats read them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

import ferrum_jax
from ferrum_jax import models
from ferrum_jax.weights.codes import decode, decode_stack, read_codes
from ferrum_jax.weights.scheme import read_scheme
from scripts.make_references import logits_of
from tests import tiny
from tests.weights import test_mxfp4

SHAPE = (40, 48)
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8: dict[str, Any] = INT8 | {"type": "float"}

pytestmark = pytest.mark.reference


@pytest.mark.parametrize(
    ("form", "weights", "scales"),
    [
        ("pack-quantized", INT4, (40, 6)),
        ("pack-quantized", INT4 | {"symmetric": False}, (40, 6)),
        ("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}, (40, 1)),
        ("pack-quantized", INT4 | {"num_bits": 8}, (40, 6)),
        ("int-quantized", INT8, (40, 1)),
        ("int-quantized", INT8 | {"symmetric": False}, (40, 1)),
        ("float-quantized", FP8, (40, 1)),
        ("float-quantized", FP8 | {"strategy": "tensor"}, (1,)),
        ("float-quantized", FP8 | {"strategy": "block", "block_structure": [16, 16]}, (3, 3)),
    ],
)
def test_what_compressed_tensors_packs_is_read_as_it_reads_it(
    form: str, weights: dict[str, Any], scales: tuple[int, ...]
):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    draw, bits = torch.Generator().manual_seed(3), weights["num_bits"]
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))
    largest = 448 if weights["type"] == "float" else 2 ** (bits - 1)
    tensors = {
        "weight": torch.randn(SHAPE, generator=draw),
        "weight_scale": (torch.rand(scales, generator=draw) * 0.5 + 0.2) * 3 / largest,
    }
    if not weights["symmetric"]:
        tensors["weight_zero_point"] = torch.randint(-largest, largest, scales, dtype=torch.int8, generator=draw)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(tensors, scheme)
    expected = compressor.decompress(packed, scheme)["weight"].float().numpy()
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"a": {"weights": weights}}}
    parts = {name: _array(tensor) for name, tensor in packed.items()}
    np.testing.assert_array_equal(decode(read_codes(parts, read_scheme(config), SHAPE)), expected)


def test_a_stack_in_mxfp4_is_read_as_transformers_reads_it():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(4)
    blocks, scales = rng.integers(256, size=(3, 10, 2, 16)), rng.integers(253, size=(3, 10, 2))
    parts = {"blocks": blocks.astype(np.uint8), "scales": scales.astype(np.uint8)}
    given = (torch.from_numpy(part) for part in parts.values())
    expected = mxfp4.convert_moe_packed_tensors(*given, dtype=torch.float32).transpose(1, 2).numpy()
    np.testing.assert_array_equal(decode_stack(parts).astype(np.float32), expected)


def test_a_model_in_mxfp4_gives_the_logits_of_transformers(tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(
        test_mxfp4.write(tmp_path),
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    tokens = tiny.prompt("gpt_oss")
    params, cfg = ferrum_jax.load_params(tmp_path, "float32")
    logits = jax.jit(models.forward, static_argnums=2)(params, jnp.asarray([tokens]), cfg)
    np.testing.assert_allclose(logits[0], logits_of(model.eval(), tokens), rtol=0, atol=2e-4)


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.numpy()
