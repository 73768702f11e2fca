"""The logits of Hugging Face transformers at every position, against references by scripts/make_references.py."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax import models
from tests import tiny
from tests.tiers import by_default

TOLERANCE = 2e-4  # float32 sums in another order, over three layers; logits are of the order of one
REFERENCES = Path(__file__).parents[1] / "references" / "tiny.npz"

every_model = pytest.mark.parametrize("name", by_default(tiny.CONFIGS, *tiny.QUICK))


@pytest.fixture(scope="module")
def references() -> dict[str, NDArray[np.float32]]:
    with np.load(REFERENCES) as file:
        return dict(file)


def test_every_tiny_model_has_a_reference(references: dict[str, NDArray[np.float32]]):
    shapes = {name: (len(tiny.prompt(name)), config["vocab_size"]) for name, config in tiny.CONFIGS.items()}
    assert {name: logits.shape for name, logits in references.items()} == shapes


def test_the_quick_models_have_one_of_every_family():
    families = [models.family(tiny.model_config(name)) for name in tiny.QUICK]
    assert len(set(families)) == len(families)
    missing = [name for name in tiny.CONFIGS if models.family(tiny.model_config(name)) not in families]
    assert missing == [], "add one of these to tiny.QUICK"


@every_model
def test_the_pure_forward_equals_the_reference_at_every_position(name: str, references: dict[str, NDArray[np.float32]]):
    tokens = jnp.asarray([tiny.prompt(name)])
    logits = jax.jit(models.forward, static_argnums=2)(
        tiny.tiny_params(tiny.CONFIGS[name]), tokens, tiny.model_config(name)
    )
    np.testing.assert_allclose(logits[0], references[name], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_loaded_folder_equals_the_reference_at_every_position(
    name: str, references: dict[str, NDArray[np.float32]], tmp_path: Path
):
    tokens, last = tiny.prompt(name), len(tiny.prompt(name)) - 1
    folder = tiny.write_folder(tmp_path, tiny.CONFIGS[name], shards=2)
    capacity = 320 if "long" in name else 160  # positions
    engine = ferrum_jax.EngineConfig(max_seqs=1, kv_capacity=capacity, block_size=8, verify_tokens=32)
    with ferrum_jax.load(folder, engine=engine, progress=False) as model:
        logits = model.forward_verify("a", tokens)
        np.testing.assert_allclose(logits, references[name], rtol=0, atol=TOLERANCE)
        model.truncate_kv("a", last)
        decoded = model.decode("a", tokens[last], last)
        np.testing.assert_allclose(decoded, references[name][last], rtol=0, atol=TOLERANCE)
