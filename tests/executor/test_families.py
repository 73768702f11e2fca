"""Law 2 for every family: any chunking, any batch and token by token give what transformers gives in one shot."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax.executor import ModelRunner
from tests import tiny

TOLERANCE = 2e-4  # float32 sums in another order; logits are of the order of one
REFERENCES = Path(__file__).parents[1] / "references" / "tiny.npz"
MODELS = [
    "deepseek3",  # experts, and attention over latents
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "gemma2", "gemma3_rope_by_kind", "phi3_beyond", "olmo2", "olmo3", "granite", "smollm3_window_biases",
            "gpt_oss",
        )
    ),
]  # fmt: skip
CHUNKS = (16, 3, 1, 9, 1, 1, 8, 2, 4)  # tokens, which end within the prompt; single ones are decoded
ENGINE = ferrum_jax.EngineConfig(
    max_seqs=3, kv_capacity=64, block_size=8, decode_rows=(3,), query_blocks=(3,), block_tokens=16, prefix_cache=False
)


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    folder = tiny.write_folder(tmp_path_factory.mktemp(request.param), tiny.CONFIGS[request.param])
    with np.load(REFERENCES) as file, ferrum_jax.load(folder, engine=ENGINE, progress=False) as model:
        yield model, tiny.prompt(request.param), file[request.param]


def ends(start: int) -> Iterator[tuple[int, int]]:
    """Returns first and last position of the chunks of a sequence, the first of which are left out."""
    at = 0
    for size in (sum(CHUNKS[: start + 1]), *CHUNKS[start + 1 :]):
        yield at, at + size
        at += size


def test_sequences_that_pass_the_original_positions_of_longrope_are_asked_for(tmp_path: Path):
    folder = tiny.write_folder(tmp_path, tiny.CONFIGS["phi3_beyond"])
    for asked, capacity, is_long in ((None, tiny.ORIGINAL, False), (12, 12, False), (100, 100, True)):
        with ferrum_jax.load(folder, max_seqs=1, kv_capacity=asked, progress=False) as model:
            assert model.kv_capacity() == capacity
            assert (scaling := model.model_config.rope_scaling) is not None
            assert scaling.is_long is is_long


@pytest.mark.slow
def test_chunks_and_single_tokens_give_the_reference(served: tuple[ModelRunner, list[int], NDArray[np.float32]]):
    model, prompt, expected = served
    for start, end in ends(0):
        rows = np.asarray(model.unified_forward([("alone", prompt[start:end], start, True)]), np.float32)
        np.testing.assert_allclose(rows[0], expected[end - 1], rtol=0, atol=TOLERANCE, err_msg=f"{start} to {end}")
    model.release("alone")


def test_rows_of_a_batch_at_different_positions_give_the_reference(
    served: tuple[ModelRunner, list[int], NDArray[np.float32]],
):
    model, prompt, expected = served
    for step in zip(ends(0), ends(1), ends(3), strict=False):
        items = [(f"row {i}", prompt[start:end], start, True) for i, (start, end) in enumerate(step)]
        rows = np.asarray(model.unified_forward(items), np.float32)
        for (_, end), logits in zip(step, rows, strict=True):
            np.testing.assert_allclose(logits, expected[end - 1], rtol=0, atol=TOLERANCE, err_msg=str(step))
    for i in range(3):
        model.release(f"row {i}")
