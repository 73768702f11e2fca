"""Traffic and changes of weights in a random order, and what each token's log-probability must then be."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ferrum_jax import LLM, SamplingParams, models
from ferrum_jax.generate.intake import RequestOptions
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.rollout import kv_spec
from ferrum_jax.generate.updates import LivePolicy, params_update
from ferrum_jax.kvcache import state
from ferrum_jax.models import Batch, Rows
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import CAPACITY, CFG

WIDTH = CAPACITY + 1  # a request's last token is never read
TOLERANCE = 2e-5  # float32 sums in another order
PREFIXES = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [2, 7], [8] * 20, [36]]
Logprobs = Callable[[Sequence[int], Sequence[int]], NDArray[np.float32]]


def versions_of(params: ParamTree, count: int) -> list[ParamTree]:
    """Draws weights near some, which differ enough for each token's log-probability to tell them apart."""
    found = [params]
    for at in range(1, count):
        keys = jax.random.split(jax.random.key(at), len(jax.tree.leaves(params)))
        noise = jax.tree.unflatten(jax.tree.structure(params), list(keys))
        found.append(jax.tree.map(lambda leaf, key: leaf + 0.05 * jax.random.normal(key, leaf.shape), params, noise))
    return found


def make_oracle(weights: Sequence[ParamTree]) -> Logprobs:
    """Returns log-probabilities `[n, V]` after each token, of which each is computed by the weights named for it.

    The pure step runs over the tokens of one version after the other, on one KV: with one version, it is the forward.
    """
    spec = kv_spec(weights[0], CFG, rows=1, positions=WIDTH)

    @jax.jit
    def step(params: ParamTree, kv: Any, tokens: jax.Array, start: jax.Array, count: jax.Array):
        rows = Rows(tokens=tokens, lengths=start[None], counts=count[None], tables=jnp.zeros((1, 1), jnp.int32))
        batch = Batch(groups=(rows,), logit_rows=jnp.arange(WIDTH, dtype=jnp.int32))
        logits, kv, _ = models.family(CFG).forward(params, kv, batch, CFG)
        return jax.nn.log_softmax(logits), kv

    def logprobs(tokens: Sequence[int], versions: Sequence[int]) -> NDArray[np.float32]:
        kv, found, start = state.empty(spec), [], 0
        while start < len(tokens):
            count = next((at for at, one in enumerate(versions[start:]) if one != versions[start]), len(tokens) - start)
            padded = np.zeros((1, WIDTH), np.int32)
            padded[0, :count] = tokens[start : start + count]
            out, kv = step(weights[versions[start]], kv, padded, np.int32(start), np.int32(count))
            found.append(np.asarray(out)[:count])
            start += count
        return np.concatenate(found)

    return logprobs


COPIED = jax.jit(lambda new, served: new)
TAKEN_OVER = jax.jit(lambda new, served: new, donate_argnums=1, keep_unused=True)


@dataclass
class Traffic:
    """One interleaving: requests come, weights change, steps run, as drawn."""

    llm: LLM
    weights: Sequence[ParamTree]
    policy: LivePolicy
    seed: int
    requests: list[Request] = field(default_factory=list)
    updates: list[tuple[Future[int], int]] = field(default_factory=list)  # and which weights

    def run(self, events: int = 14) -> None:
        """Runs to the end."""
        draw, scheduler = random.Random(self.seed), self.llm.engine.scheduler
        self.first = self.llm.model.params_version  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(events):
            draw.choice([self._submit, self._submit, self._update, self._steps])(draw)
        while scheduler.has_work:
            scheduler.step()

    def _submit(self, draw: random.Random) -> None:
        prompt = draw.choice(PREFIXES) + [draw.randrange(CFG.vocab_size) for _ in range(draw.randint(0, 6))]
        if draw.random() < 0.2:
            after = [draw.randrange(CFG.vocab_size) for _ in range(draw.randint(1, 9))]
            group = [self.llm._intake.scored(prompt, after)]
        else:
            temperature, n = draw.choice([(0.0, 1), (1.0, 1), (1.0, 3), (1.0, 8)])
            params = SamplingParams(
                max_tokens=draw.randint(1, 12), temperature=temperature, seed=draw.randrange(2**32),
                logprobs=True, prompt_logprobs=draw.random() < 0.3, n=n, ignore_eos=True,
            )  # fmt: skip
            group = self.llm._intake.group(prompt, params, RequestOptions())
        self.requests += group
        self.llm.engine.scheduler.submit(group[0])

    def _update(self, draw: random.Random) -> None:
        which = draw.randrange(len(self.weights))
        makes_them = draw.random() < 0.5
        new = (lambda served: self._made(which, served)) if makes_them else self.weights[which]
        update = params_update(self.llm.model, new, self.policy)
        self.llm.engine.scheduler.update(update)
        self.updates.append((update.done, which))

    def _made(self, which: int, served: ParamTree) -> ParamTree:
        """Copies weights, into the memory of the served ones unless those are among the `weights`."""
        lent = {id(leaf) for leaf in jax.tree.leaves(list(self.weights))}
        is_lent = any(id(leaf) in lent for leaf in jax.tree.leaves(served))
        return (COPIED if is_lent else TAKEN_OVER)(self.weights[which], served)

    def _steps(self, draw: random.Random) -> None:
        for _ in range(draw.randint(1, 6)):
            self.llm.engine.scheduler.step()

    def check(self, oracle: Logprobs) -> None:
        """Compares every figure with that of the weights which it is said to be of."""
        which = {self.first: 0} | {done.result(): own for done, own in self.updates}
        assert list(which) == list(range(self.first, self.first + len(self.updates) + 1))
        for request in self.requests:
            out = request.output(return_error=True)
            if not request.limit:
                if out.error is None:
                    self._check_scores(
                        request.prompt, request.scores, request.score_from or 1, set(which.values()), oracle
                    )
                else:
                    assert self.policy == "abort"
                continue
            assert out.error is None
            assert out.finish_reason == "length" or (self.policy, out.finish_reason) == ("abort", "abort")
            assert len(out.token_ids) == request.limit or out.finish_reason == "abort"
            assert len(out.weight_versions) == len(out.token_ids)
            assert out.weight_versions == sorted(out.weight_versions)
            if self.policy in ("wait", "abort"):
                assert len(set(out.weight_versions)) <= 1
            if out.prompt_logprobs is not None and out.finish_reason == "length":
                scores = [one for one in out.prompt_logprobs if one is not None]
                sampling = {which[out.weight_versions[0]]}
                self._check_scores(request.prompt, scores, 1, sampling, oracle)
            self._check_answer(request, [which[one] for one in out.weight_versions], oracle)

    def _check_answer(self, request: Request, versions: list[int], oracle: Logprobs) -> None:
        out, length = request.output(), len(request.prompt)
        tokens = request.prompt + out.token_ids
        assert out.logprobs is not None
        if self.policy == "keep":
            # A token is read by the weights that choose the one after it; a prompt as a whole, as who has sampled
            # nothing begins again. What lost its KV to others has read again by other weights than it tells.
            assert out.preemptions == 0
            read = [versions[0]] * (length - 1) + versions if versions else []
            found = oracle(tokens[:-1], read) if versions else np.zeros((0, 1))
            wanted = found[np.arange(length - 1, length - 1 + len(versions)), out.token_ids] if versions else []
        else:
            wanted = [
                oracle(tokens[:-1], [one] * (len(tokens) - 1))[length - 1 + at, out.token_ids[at]]
                for at, one in enumerate(versions)
            ]
        np.testing.assert_allclose(out.logprobs, wanted, rtol=0, atol=TOLERANCE, err_msg=f"seed {self.seed}")

    def _check_scores(
        self, tokens: list[int], scores: list[float], start: int, which: set[int], oracle: Logprobs
    ) -> None:
        """All scores of one prompt are of the same weights, one of `which`."""
        at = np.arange(start - 1, len(tokens) - 1)
        each = [oracle(tokens, [one] * len(tokens))[at, tokens[start:]] for one in which]
        differences = [np.abs(np.array(scores) - wanted).max(initial=0) for wanted in each]
        assert min(differences) < TOLERANCE, f"seed {self.seed}: {differences}"
