"""A real model: SmolLM2-135M-Instruct from its GGUF file, against references made by scripts/make_references."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax import models

TOLERANCE = 2e-3  # float32 sums in another order, over thirty layers; logits reach 30
NEARLY_EQUAL = 1e-3  # logits so close may change places
REFERENCES = Path(__file__).parents[1] / "references" / "smollm2.npz"
SHORT = ("english", "code", "french")
PROMPTS = (*SHORT, "license")

Reference = dict[str, NDArray]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[ferrum_jax.ModelRunner]:
    engine = ferrum_jax.EngineConfig(
        max_seqs=3,
        kv_capacity=768,
        block_size=64,
        decode_rows=(1, 3),
        query_blocks=(1, 3),
        block_tokens=64,
        verify_tokens=64,
        max_step_tokens=3 * 64,
    )
    with ferrum_jax.load(smollm2_path, engine=engine, progress=False) as runner:
        yield runner


@pytest.fixture
def empty(model: ferrum_jax.ModelRunner) -> ferrum_jax.ModelRunner:
    model.reset()
    return model


@pytest.fixture(scope="module")
def references() -> Reference:
    with np.load(REFERENCES) as file:
        return dict(file)


def test_one_forward_with_the_layers_in_one_loop_equals_the_reference(smollm2_path: Path, references: Reference):
    params, cfg = ferrum_jax.load_params(smollm2_path, "float32", layout="scanned")
    prompt, greedy = references["english/tokens"].tolist(), references["english/greedy"].tolist()
    count = _comparable("english", references)
    tokens = jnp.asarray([prompt + greedy[: count - 1]])
    logits = np.asarray(jax.jit(models.forward, static_argnums=2)(params, tokens, cfg)[0])
    _assert_logits("english", logits[: len(prompt)], references)
    assert logits[len(prompt) - 1 :].argmax(axis=-1).tolist() == greedy[:count]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_the_logits_equal_the_reference_at_every_position(
    name: str, empty: ferrum_jax.ModelRunner, references: Reference
):
    logits = empty.forward_verify(name, references[f"{name}/tokens"].tolist())
    _assert_logits(name, logits, references)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_prefill_and_decode_continue_as_the_reference(name: str, empty: ferrum_jax.ModelRunner, references: Reference):
    tokens = references[f"{name}/tokens"].tolist()
    chosen = [int(empty.prefill(name, tokens).argmax())]
    while len(chosen) < _comparable(name, references):
        chosen.append(int(empty.decode(name, chosen[-1], len(tokens) + len(chosen) - 1).argmax()))
    assert chosen == references[f"{name}/greedy"][: len(chosen)].tolist()


@pytest.mark.slow
def test_decode_batch_continues_all_three_as_the_reference(empty: ferrum_jax.ModelRunner, references: Reference):
    prompts = {name: references[f"{name}/tokens"].tolist() for name in SHORT}
    chosen = {name: [int(empty.prefill(name, tokens).argmax())] for name, tokens in prompts.items()}
    for step in range(max(_comparable(name, references) for name in SHORT) - 1):
        batch = [(name, chosen[name][-1], len(prompts[name]) + step) for name in SHORT]
        for name, logits in zip(SHORT, empty.decode_batch(batch), strict=True):
            chosen[name].append(int(logits.argmax()))
    _assert_greedy(chosen, references)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SHORT, ("license",)], ids=["all_three", "license"])
def test_unified_forward_in_chunks_of_five_continues_as_the_reference(
    names: tuple[str, ...], empty: ferrum_jax.ModelRunner, references: Reference
):
    prompts = {name: references[f"{name}/tokens"].tolist() for name in names}
    chosen: dict[str, list[int]] = {name: [] for name in names}
    while any(len(chosen[name]) < _comparable(name, references) for name in names):
        items = []
        for name, tokens in prompts.items():  # sequences reach decoding at different times, so steps are mixed
            done = empty.kv_len(name) or 0
            chunk = tokens[done : done + 5] or chosen[name][-1:]
            items.append((name, chunk, done, done + len(chunk) >= len(tokens)))
        for (name, _, _, is_final), logits in zip(items, empty.unified_forward(items), strict=True):
            assert (logits is None) != is_final
            if logits is not None:
                chosen[name].append(int(logits.argmax()))
    _assert_greedy(chosen, references)


@pytest.mark.slow
def test_generate_continues_all_prompts_together_as_the_reference(empty: ferrum_jax.ModelRunner, references: Reference):
    llm = ferrum_jax.LLM.from_model(empty, max_rows=3, chunk_tokens=64)  # four prompts for three slots
    prompts = [references[f"{name}/tokens"].tolist() for name in PROMPTS]
    length = len(references["english/greedy"])
    outs = llm.generate(prompts, ferrum_jax.SamplingParams(max_tokens=length))
    assert [len(out.token_ids) for out in outs] == [length] * len(PROMPTS)
    _assert_greedy({name: out.token_ids for name, out in zip(PROMPTS, outs, strict=True)}, references)


def _assert_logits(name: str, logits: NDArray[np.float32], references: Reference) -> None:
    found = {
        "logits": logits[:, references["columns"]],
        "best_logits": np.take_along_axis(logits, references[f"{name}/best_ids"], axis=1),
        "logsumexp": np.logaddexp.reduce(logits, axis=1, dtype=np.float64),
    }
    for part, values in found.items():
        np.testing.assert_allclose(values, references[f"{name}/{part}"], rtol=0, atol=TOLERANCE, err_msg=part)


def _assert_greedy(chosen: dict[str, list[int]], references: Reference) -> None:
    for name, ids in chosen.items():
        count = _comparable(name, references)
        assert ids[:count] == references[f"{name}/greedy"][:count].tolist(), name


def _comparable(name: str, references: Reference) -> int:
    """Counts the greedy tokens up to the first place where the reference's two best were nearly equal."""
    close = np.flatnonzero(references[f"{name}/gaps"] < NEARLY_EQUAL)
    return int(close[0]) if len(close) else len(references[f"{name}/greedy"])
