"""SmolLM2 over HTTP: log-probabilities of 200 prompts are the forward's, alone and under load, and seeds repeat."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from numpy.typing import NDArray

import ferrum_jax
from ferrum_jax import LLM, models
from ferrum_jax.serve.server import running
from ferrum_jax.serve.settings import ServerSettings

PROMPTS, LENGTH = 200, 48  # tokens of the longest
TOLERANCE = 1e-4

pytestmark = pytest.mark.slow


def forwards(llm: LLM, prompts: list[list[int]]) -> tuple[list[NDArray[np.floating]], list[float]]:
    """The log-probability of each token of each prompt but the first, without a cache; and how far each prompt's move.

    That is the most that they change where every embedding changes in its last place, as by rounding.
    """
    params, cfg = models.dequantise(llm.runner.params), llm.runner.model_config
    table = params["model"]["embed_tokens"]["weight"]
    run = jax.jit(lambda params, tokens: jax.nn.log_softmax(models.forward(params, tokens, cfg), axis=-1))

    def logprobs(seed: int | None) -> list[NDArray[np.floating]]:
        moved = table
        if seed is not None:
            moved *= 1 + jax.random.rademacher(jax.random.key(seed), table.shape, table.dtype) * 2.0**-23
        tree = params | {"model": params["model"] | {"embed_tokens": {"weight": moved}}}
        found = []
        for start in range(0, len(prompts), 8):
            some = prompts[start : start + 8]
            batch = np.array([one + [0] * (LENGTH - len(one)) for one in some], np.int32)
            rows = zip(np.asarray(run(tree, batch)), some, strict=True)
            found += [row[np.arange(len(one) - 1), one[1:]] for row, one in rows]
        return found

    wanted, others = logprobs(None), [logprobs(seed) for seed in range(3)]
    moves = [max(np.abs(other - mine).max() for other in each) for mine, *each in zip(wanted, *others, strict=True)]
    return wanted, moves


def test_log_probabilities_over_http_are_the_forwards_alone_and_under_load(smollm2_path: Path):
    draw = random.Random(0)
    with LLM(smollm2_path, dtype="float32", max_seqs=8, kv_capacity=128, prefix_cache=True, progress=False) as llm:
        assert llm.tokenizer is not None
        words = llm.tokenizer.encode((Path(ferrum_jax.__file__).parents[1] / "README.md").read_text())
        sizes = [draw.randint(2, LENGTH) for _ in range(PROMPTS)]
        prompts = [words[start : start + size] for size in sizes for start in [draw.randrange(len(words) - size)]]
        wanted, moves = forwards(llm, prompts)
        with (
            running(llm, ServerSettings(model="smol", max_waiting=PROMPTS)) as server,
            httpx.Client(base_url=server.url, timeout=600, trust_env=False) as http,
        ):

            def score(prompt: list[int]) -> list[float]:
                body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
                found = http.post("/v1/completions", json=body)
                return found.json()["choices"][0]["logprobs"]["token_logprobs"][1:-1]

            def draw_text(seed: int) -> str:
                body: dict[str, Any] = {"prompt": "Once upon a time", "seed": seed, "max_tokens": 24}
                return http.post("/v1/completions", json=body).json()["choices"][0]["text"]

            alone, texts = [score(one) for one in prompts], [draw_text(seed) for seed in range(8)]
            with ThreadPoolExecutor(24) as pool:
                loaded = pool.map(score, prompts)
                again = pool.map(draw_text, [*range(8)] * 2)
                loaded, again = list(loaded), list(again)
    for found in (alone, loaded):
        for mine, theirs, move in zip(found, wanted, moves, strict=True):
            within = TOLERANCE if move <= TOLERANCE else 4 * move  # ill-conditioned; each layer rounds once more
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=within)
    assert sum(move > TOLERANCE for move in moves) <= 2  # as "pip install -" is, whose log-probabilities move by 4e-4
    assert again == texts * 2
