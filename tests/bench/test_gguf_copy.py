"""The file that llama.cpp reads holds the weights under test, bit for bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import gguf_copy, models
from bench.models import TINY
from ferrum_jax.loading import load_params
from ferrum_jax.models.specs import named_leaves


@pytest.mark.parametrize("tied", [True, False])
def test_what_was_written_is_read_back(tied: bool, tmp_path: Path):
    cfg = replace(TINY, tie_word_embeddings=tied, rope_theta=20000.0, rms_norm_eps=1e-5)
    subject = models.random("tiny", cfg, "float32")
    gguf_copy.write(subject, tmp_path / "tiny.gguf")
    params, found = load_params(tmp_path / "tiny.gguf", "float32")
    assert replace(found, rms_norm_eps=1e-5) == cfg
    assert found.rms_norm_eps == pytest.approx(1e-5)
    ours, theirs = named_leaves(subject.params), named_leaves(params)
    assert set(ours) == set(theirs)
    for name, leaf in ours.items():
        np.testing.assert_array_equal(theirs[name], leaf)


def test_matrices_are_written_in_eight_bits(tmp_path: Path):
    subject = models.random(
        "tiny", replace(TINY, hidden_size=64, intermediate_size=96, num_attention_heads=8), "float32"
    )
    gguf_copy.write(subject, tmp_path / "tiny.gguf", "Q8_0")
    params, _ = load_params(tmp_path / "tiny.gguf", "float32", quantize="keep")
    ours, theirs = subject.params["model"]["layers"][0], params["model"]["layers"][0]
    assert theirs["mlp"]["up_proj"]["weight"].values.dtype == np.int8
    np.testing.assert_array_equal(theirs["input_layernorm"]["weight"], ours["input_layernorm"]["weight"])


def test_another_family_is_refused_before_anything_is_written(tmp_path: Path):
    subject = models.random("tiny", replace(TINY, model_type="qwen3", qk_norm=True), "float32")
    with pytest.raises(NotImplementedError, match="qwen3"):
        gguf_copy.write(subject, tmp_path / "tiny.gguf")
    assert not list(tmp_path.iterdir())
