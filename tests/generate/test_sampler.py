"""The sampler on the host gives what the pure function gives, whatever bucket a request falls into."""

from typing import Any

import jax
import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.contract.errors import BackendError, DeviceError
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.sampler import Sampler
from ferrum_jax.generate.stops import StopWatcher

V = 19
LOGITS = np.random.default_rng(0).standard_normal((7, V)).astype(np.float32) * 3


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(V, 3)  # buckets of 1, 2 and 3 rows


def request(seed: int = 0, length: int = 4, **params: Any) -> Request:
    return Request(
        cache_id="r",
        prompt=[5] * length,
        params=SamplingParams(**params),
        seed=seed,
        stop_ids=frozenset(),
        limit=9,
        detokenizer=None,
        watcher=StopWatcher(()),
    )


def test_plain_greedy_requests_take_the_arg_max_and_compile_nothing():
    sampler = Sampler(V, 3)
    chosen = sampler.choose([request(top_k=2) for _ in LOGITS], list(LOGITS))
    assert chosen == [(int(np.argmax(row)), None) for row in LOGITS]
    assert sampler._compiled == {}


def test_a_choice_is_the_same_in_every_bucket_and_beside_any_other(sampler: Sampler):
    requests = [
        request(seed=at, length=at + 1, temperature=temperature, **extra)
        for at, (temperature, extra) in enumerate(
            [
                (1.0, {}), (0.0, {}), (2.0, {"top_k": 4}), (1.0, {"top_p": 0.7}), (0.0, {"logprobs": True}),
                (1.5, {"min_p": 0.2}), (0.0, {"repetition_penalty": 9.0}),
            ]
        )
    ]  # fmt: skip
    alone = [sampler.choose([one], [row])[0] for one, row in zip(requests, LOGITS, strict=True)]
    for size in (2, 3, 7):  # 7 rows take three calls
        for start in range(0, 7, size):
            group = slice(start, start + size)
            together = sampler.choose(requests[group], list(LOGITS[group]))
            assert [token for token, _ in together] == [token for token, _ in alone[group]]


def test_logprobs_come_where_they_were_asked_for(sampler: Sampler):
    asked, other = request(logprobs=True), request(temperature=1.0)
    (token, logprob), (_, none) = sampler.choose([asked, other], list(LOGITS[:2]))
    assert none is None
    assert token == np.argmax(LOGITS[0])
    assert logprob == pytest.approx(float(jax.nn.log_softmax(LOGITS[0])[token]), abs=1e-5)


def test_the_penalty_falls_on_prompt_and_answer(sampler: Sampler):
    row = np.full(V, -9.0, np.float32)
    row[[5, 6, 7]] = [3.0, 2.0, 1.0]
    penalised = request(repetition_penalty=4.0)  # its prompt is all 5
    assert sampler.choose([penalised], [row])[0][0] == 6
    penalised.append(6, None)
    assert sampler.choose([penalised], [row])[0][0] == 7


def test_a_draw_moves_with_the_position(sampler: Sampler):
    flat = np.zeros(V, np.float32)
    drawn = [sampler.choose([request(seed=1, length=n, temperature=1.0)], [flat])[0][0] for n in range(1, 20)]
    assert len(set(drawn)) > 5


def test_top_k_may_exceed_the_vocabulary_and_any_integer_type(sampler: Sampler):
    wide = request(temperature=1.0, top_k=2**40)
    assert sampler.choose([wide], [LOGITS[0]]) == sampler.choose([request(temperature=1.0)], [LOGITS[0]])


def test_what_one_request_needs_can_be_compiled_ahead():
    sampler = Sampler(V, 3)
    sampler.prepare(SamplingParams(top_k=3))
    assert sampler._compiled == {}
    sampler.prepare(SamplingParams(logprobs=True))
    assert sorted(sampler._compiled) == [1]


def test_failures_below_are_errors_of_this_package(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: out of luck")

    sampler = Sampler(V, 1)
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", fail)
        with pytest.raises(BackendError, match=r"the sampler of 1 rows does not compile: .*out of luck"):
            sampler.choose([request(temperature=1.0)], [LOGITS[0]])
    sampler.warmup()
    monkeypatch.setitem(sampler._compiled, 1, fail)
    with pytest.raises(DeviceError, match=r"sampling 1 rows failed on the device: .*out of luck"):
        sampler.choose([request(temperature=1.0)], [LOGITS[0]])


def test_warmup_compiles_every_bucket():
    sampler = Sampler(V, 3)
    sampler.warmup()
    assert sorted(sampler._compiled) == [1, 2, 3]
