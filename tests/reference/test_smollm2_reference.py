"""SmolLM2-135M-Instruct, live against transformers with the same dequantised weights in float32."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedModel

import ferrum_jax
from scripts.make_references import GREEDY, continue_greedily, load_smollm2, logits_of
from tests.tiers import by_default

pytestmark = pytest.mark.reference

TOLERANCE = 2e-3  # float32 sums in another order, over thirty layers; logits reach 30
NEARLY_EQUAL = 1e-3  # logits so close may change places
REFERENCES = Path(__file__).parents[1] / "references" / "smollm2.npz"
PROMPTS = ("english", "code", "french", "license")


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> PreTrainedModel:
    return load_smollm2(smollm2_path)


@pytest.fixture(scope="module")
def ours(smollm2_path: Path) -> Iterator[ferrum_jax.ModelRunner]:
    engine = ferrum_jax.EngineConfig(
        max_seqs=1,
        kv_capacity=768,
        block_size=64,
        query_blocks=(1,),
        block_tokens=64,
        verify_tokens=64,
        max_step_tokens=64,
    )
    with ferrum_jax.load(smollm2_path, dtype="float32", engine=engine, progress=False) as runner:
        yield runner


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    with np.load(REFERENCES) as file:
        return {name: file[f"{name}/tokens"].tolist() for name in PROMPTS}


@pytest.mark.parametrize("name", PROMPTS)
def test_every_logit_of_every_position_equals_that_of_transformers(
    name: str, theirs: PreTrainedModel, ours: ferrum_jax.ModelRunner, prompts: dict[str, list[int]]
):
    ours.reset()
    expected: NDArray[np.float32] = logits_of(theirs, prompts[name])
    np.testing.assert_allclose(ours.forward_verify(name, prompts[name]), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", by_default(PROMPTS, "french", "license"))
def test_greedy_tokens_are_those_of_transformers(
    name: str, theirs: PreTrainedModel, ours: ferrum_jax.ModelRunner, prompts: dict[str, list[int]]
):
    ours.reset()
    tokens = prompts[name]
    expected, gaps = continue_greedily(theirs, tokens, GREEDY)
    close = np.flatnonzero(gaps < NEARLY_EQUAL)
    count = int(close[0]) if len(close) else GREEDY
    chosen = [int(ours.prefill(name, tokens).argmax())]
    while len(chosen) < count:
        chosen.append(int(ours.decode(name, chosen[-1], len(tokens) + len(chosen) - 1).argmax()))
    assert chosen[:count] == expected[:count].tolist()
