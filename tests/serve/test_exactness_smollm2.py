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


class Forward:
    """The forward without a cache, of prompts together or of one alone."""

    def __init__(self, llm: LLM):
        params, cfg = models.dequantise(llm.runner.params), llm.runner.model_config
        self._run = jax.jit(lambda tokens: jax.nn.log_softmax(models.forward(params, tokens, cfg), axis=-1))

    def together(self, prompts: list[list[int]]) -> list[NDArray[np.floating]]:
        """The log-probability of each token of each prompt but the first; they run padded, eight at a time."""
        found = []
        for start in range(0, len(prompts), 8):
            some = prompts[start : start + 8]
            logprobs = np.asarray(self._run(np.array([one + [0] * (LENGTH - len(one)) for one in some], np.int32)))
            found += [logprobs[row, np.arange(len(one) - 1), one[1:]] for row, one in enumerate(some)]
        return found

    def alone(self, prompt: list[int]) -> NDArray[np.floating]:
        """The same of one prompt without padding."""
        return np.asarray(self._run(np.array([prompt], np.int32)))[0, np.arange(len(prompt) - 1), prompt[1:]]


def test_log_probabilities_over_http_are_the_forwards_alone_and_under_load(smollm2_path: Path):
    draw = random.Random(0)
    with LLM(smollm2_path, dtype="float32", max_seqs=8, kv_capacity=128, prefix_cache=True, progress=False) as llm:
        assert llm.tokenizer is not None
        words = llm.tokenizer.encode((Path(ferrum_jax.__file__).parents[1] / "README.md").read_text())
        sizes = [draw.randint(2, LENGTH) for _ in range(PROMPTS)]
        prompts = [words[start : start + size] for size in sizes for start in [draw.randrange(len(words) - size)]]
        forward = Forward(llm)
        wanted = forward.together(prompts)
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
        unlike = 0
        for prompt, mine, beside, theirs in zip(prompts, alone, loaded, wanted, strict=True):
            if np.abs(np.array(mine) - theirs).max() > TOLERANCE:
                # Ill-conditioned: the forward differs from itself by as much, batched and alone.
                theirs, unlike = forward.alone(prompt), unlike + 1
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(beside, theirs, rtol=0, atol=TOLERANCE)
    assert unlike <= 2
    assert again == texts * 2
