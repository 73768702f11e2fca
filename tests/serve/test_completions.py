"""`/v1/completions` by OpenAI's own client: every parameter, whole and in parts."""

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from ferrum_jax import LLM, SamplingParams, models
from ferrum_jax.contract.errors import ConfigError
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.serve import completions
from ferrum_jax.serve.server import Server
from ferrum_jax.serve.settings import ServerSettings
from tests.executor.conftest import CFG
from tests.serve.conftest import Serve, async_client

PROMPT = "the quick brown fox"
ASK: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
TOLERANCE = 1e-5  # float32 sums in another order


@pytest.fixture(scope="module")
def logprobs(params: ParamTree) -> Callable[[list[int]], NDArray[np.floating]]:
    run = jax.jit(lambda tokens: models.forward(params, tokens, CFG))

    def compute(tokens: list[int]) -> NDArray[np.floating]:
        padded = np.zeros((1, 97), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(run(padded))[0, : len(tokens)]
        return logits - np.logaddexp.reduce(logits, axis=-1, dtype=np.float64, keepdims=True)

    return compute


def text_of(llm: LLM, prompt: Any = PROMPT, **params: Any) -> str:
    asked: dict[str, Any] = {"max_tokens": 12} | params
    return llm.generate(prompt, SamplingParams(**asked))[0].text


def test_an_answer_is_the_engines(client: Any, llm: LLM):
    out = client.completions.create(**ASK)
    (choice,) = out.choices
    assert choice.text == text_of(llm)
    assert choice.finish_reason in ("stop", "length")
    assert out.usage is not None
    assert (out.usage.prompt_tokens, out.usage.total_tokens) == (19, 19 + out.usage.completion_tokens)
    assert (out.object, out.model, out.id[:5]) == ("text_completion", "tiny", "cmpl-")


def test_texts_and_ids_alone_and_in_lists_give_the_same(client: Any, llm: LLM):
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPT)
    texts = [client.completions.create(**ASK | {"prompt": prompt}).choices for prompt in (PROMPT, ids, [PROMPT], [ids])]
    assert len({one[0].text for one in texts}) == 1
    best = {"temperature": 1.0, "extra_body": {"top_k": 1}}
    both = client.completions.create(**ASK | {"prompt": [PROMPT, "a dog"], "n": 2} | best).choices
    assert [one.index for one in both] == [0, 1, 2, 3]
    assert [one.text for one in both] == [text_of(llm)] * 2 + [text_of(llm, "a dog")] * 2


def test_a_stream_tells_the_same_with_usage_at_its_end(client: Any):
    client.completions.create(**ASK)  # from here on its prompt is known, which the usage tells
    whole = client.completions.create(**ASK, logprobs=2)
    chunks = list(client.completions.create(**ASK, logprobs=2, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].text for one in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {one.usage for one in chunks[:-1]} == {None}
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({one.id for one in chunks}) == 1
    parts, told = [one.choices[0].logprobs for one in chunks[:-1]], whole.choices[0].logprobs
    assert [one for part in parts for one in part.tokens] == told.tokens
    assert [one for part in parts for one in part.text_offset] == told.text_offset
    assert [one for part in parts for one in part.token_logprobs] == pytest.approx(told.token_logprobs, abs=TOLERANCE)
    for mine, theirs in zip((one for part in parts for one in part.top_logprobs), told.top_logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=TOLERANCE)


def test_several_answers_of_several_prompts_stream_beside_each_other(client: Any):
    ask = ASK | {"prompt": [PROMPT, "a dog"], "n": 3, "temperature": 1.0, "seed": 5}
    whole = [one.text for one in client.completions.create(**ask).choices]
    texts = [""] * 6
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == whole
    assert len(set(whole)) > 2


def test_only_streams_that_ask_for_usage_name_it(http: httpx.Client):
    for options, named in (({"include_usage": True}, {"null"}), ({}, set()), (None, set())):
        text = http.post("/v1/completions", json=ASK | {"stream": True, "stream_options": options}).text
        chunks = [line for line in text.splitlines() if '"choices":[{' in line]
        assert {found for line in chunks for found in re.findall(r'"usage":(\w+)', line)} == named
        assert chunks


def test_usage_tells_how_much_of_a_prompt_was_known(http: httpx.Client, llm: LLM):
    prompt = [(7 * at) % 31 for at in range(3, 23)]  # two blocks of 8 and a part of one, in no other test
    for known in (0, 16):
        told = http.post("/v1/completions", json=ASK | {"prompt": prompt, "n": 3, "temperature": 1}).json()
        assert told["usage"]["prompt_tokens_details"] == {"cached_tokens": known}
    outs = llm.generate([prompt], SamplingParams(n=2, temperature=1.0, max_tokens=2))
    assert [out.num_cached_tokens for out in outs] == [16, 19]  # a copy computes the last token alone
    longer = [(5 * at) % 29 for at in range(50)]  # read in two steps
    few = SamplingParams(max_tokens=2)
    assert [llm.generate([longer], few)[0].num_cached_tokens for _ in range(2)] == [0, 48]
    (begun,) = llm.generate([[9, 4, 9]], SamplingParams(max_tokens=30, ignore_eos=True))
    (more,) = llm.generate([begun], SamplingParams(max_tokens=40, ignore_eos=True))
    assert more.num_cached_tokens == 3  # of the prompt, though more is known


def test_continuous_usage_is_in_every_chunk(client: Any):
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**ASK, stream=True, stream_options=options))
    counts = [one.usage.completion_tokens for one in chunks if one.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)


def test_the_log_probabilities_of_an_echo_are_the_forwards(
    client: Any, llm: LLM, logprobs: Callable[[list[int]], NDArray[np.floating]]
):
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPT)
    (choice,) = client.completions.create(**ASK, echo=True, logprobs=3, extra_body={"return_token_ids": True}).choices
    told, tokens = choice.logprobs, [*ids, *choice.token_ids]
    assert choice.text == PROMPT + text_of(llm)
    assert told is not None
    expected = logprobs(tokens)
    assert told.token_logprobs is not None
    assert told.token_logprobs[0] is None
    assert told.top_logprobs is not None
    assert told.top_logprobs[0] is None
    chosen = expected[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(told.token_logprobs[1:], chosen, rtol=0, atol=TOLERANCE)
    for at, top in enumerate(told.top_logprobs[1:]):
        best = np.sort(expected[at])[::-1][:3]
        np.testing.assert_allclose(sorted(top.values(), reverse=True)[:3], best, rtol=0, atol=TOLERANCE)
        assert told.tokens is not None
        assert top[told.tokens[at + 1]] == told.token_logprobs[at + 1]
    assert "".join(told.tokens or [])[: len(PROMPT)] == PROMPT
    assert told.text_offset == list(np.cumsum([0, *map(len, told.tokens or [])])[:-1])


def test_zero_tokens_with_echo_score_the_prompt_alone(
    client: Any, llm: LLM, logprobs: Callable[[list[int]], NDArray[np.floating]]
):
    ids = list(range(20))
    (choice,) = client.completions.create(**ASK | {"max_tokens": 0, "prompt": ids}, echo=True, logprobs=1).choices
    assert choice.logprobs is not None
    expected = logprobs(ids)[np.arange(19), ids[1:]]
    np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], expected, rtol=0, atol=TOLERANCE)
    for prompt, wanted in (([3], 1), ([3, 4], None)):
        ask = ASK | {"max_tokens": 0, "prompt": prompt}
        (choice,) = client.completions.create(**ask, echo=True, logprobs=wanted).choices
        assert (choice.text, choice.finish_reason) == ("de"[: len(prompt)], "length")


def test_prompt_logprobs_are_told_by_id(client: Any, logprobs: Callable[[list[int]], NDArray[np.floating]]):
    ids = [5, 3, 8, 1]
    (choice,) = client.completions.create(**ASK | {"prompt": ids}, extra_body={"prompt_logprobs": 2}).choices
    told = choice.prompt_logprobs
    assert told[0] is None
    expected = logprobs(ids)
    for at, (token, one) in enumerate(zip(ids[1:], told[1:], strict=True)):
        assert one[str(token)]["logprob"] == pytest.approx(expected[at, token], abs=TOLERANCE)
        first, second = map(str, np.argsort(-expected[at])[:2])
        ranks = {first: 1, second: 2}
        assert {key: value["rank"] for key, value in one.items()} == {str(token): None} | ranks
        assert len(one) in (2, 3)
    plain = client.completions.create(**ASK | {"prompt": ids}).choices[0]
    assert plain.logprobs is None
    assert not hasattr(plain, "prompt_logprobs")


def test_token_ids_are_returned_also_in_parts(client: Any, llm: LLM):
    more = {"return_token_ids": True}
    (whole,) = client.completions.create(**ASK, extra_body=more).choices
    out = llm.generate(PROMPT, SamplingParams(max_tokens=12))[0]
    assert whole.token_ids == out.token_ids
    assert whole.prompt_token_ids == out.prompt_token_ids
    chunks: list[Any] = [one.choices[0] for one in client.completions.create(**ASK, stream=True, extra_body=more)]
    assert [token for one in chunks for token in one.token_ids] == out.token_ids
    assert chunks[0].prompt_token_ids == out.prompt_token_ids
    assert not any(hasattr(one, "prompt_token_ids") for one in chunks[1:])


def test_tokens_may_be_named_by_their_ids(client: Any):
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = client.completions.create(**ASK, logprobs=1, extra_body=more).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [f"token_id:{one}" for one in choice.token_ids]


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.0, "seed": 7, "top_p": 0.5},
    {"temperature": 1.0, "seed": 7, "top_k": 3},
    {"temperature": 1.0, "seed": 7, "min_p": 0.4},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"logit_bias": {"4": 30.0}},
    {"allowed_token_ids": [0, 1, 2]},
    {"bad_words": ["a", "b"]},
    {"stop": "q"},
    {"stop": ["e", "q"], "include_stop_str_in_output": True},
    {"stop_token_ids": [4, 14]},
    {"ignore_eos": True},
    {"min_tokens": 12},
    {"max_tokens": 3},
    {"skip_special_tokens": False, "logit_bias": {"36": 30.0}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: ",".join(one))
def test_a_setting_does_what_it_does_in_the_engine(client: Any, llm: LLM, settings: dict[str, Any]):
    theirs = settings | ({"logit_bias": {int(key): value for key, value in settings["logit_bias"].items()}}
                         if "logit_bias" in settings else {})  # fmt: skip
    named = {"temperature", "seed", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop",
             "max_tokens"}  # fmt: skip
    extra = {name: value for name, value in settings.items() if name not in named}
    ask = ASK | {name: value for name, value in settings.items() if name in named}
    (choice,) = client.completions.create(**ask, extra_body=extra).choices
    assert choice.text == text_of(llm, **theirs)
    streamed = client.completions.create(**ask, extra_body=extra, stream=True)
    assert "".join(one.choices[0].text for one in streamed) == choice.text
    if "seed" not in settings:  # a draw may be the best token
        assert choice.text != text_of(llm) or settings.keys() <= {"ignore_eos", "min_tokens"}


def test_the_default_is_drawn_and_has_sixteen_tokens(client: Any, llm: LLM):
    (choice,) = client.completions.create(model="tiny", prompt=PROMPT, seed=3, extra_body={"ignore_eos": True}).choices
    assert choice.text == text_of(llm, temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)


def test_what_a_request_does_not_say_is_as_the_models_files_recommend(serve: Serve, runner: ModelRunner, llm: LLM):
    assert llm.tokenizer is not None
    own = LLM.from_model(runner, replace(llm.tokenizer, recommended={"temperature": 0.0, "repetition_penalty": 1.9}))
    assert own.get_default_sampling_params() == SamplingParams(temperature=0.0, repetition_penalty=1.9)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=1.0)
    asks: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.0}, {"temperature": 1.0}, {"temperature": None}]
    for how, settings in (("auto", own.get_default_sampling_params()), ("none", llm.get_default_sampling_params())):
        server = serve(own, generation_config=how)
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
            for ask in asks:
                body = {"prompt": PROMPT, "max_tokens": 20, "seed": 3, "ignore_eos": True} | ask
                found = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
                said = {name: value for name, value in ask.items() if value is not None}
                expected = replace(settings, max_tokens=20, seed=3, ignore_eos=True, **said)
                assert found == llm.generate([PROMPT], expected)[0].text
    with pytest.raises(ConfigError, match="generation_config is 'vllm', expected 'auto' or 'none'"):
        ServerSettings(generation_config="vllm")


@pytest.mark.parametrize(("given", "counts"), [(-1, 2**32 - 1), (2**63 - 1, 2**32 - 1), (-(2**63), 0), (2**32 + 3, 3)])
def test_a_seed_of_64_bits_counts_modulo_two_to_the_32(client: Any, llm: LLM, given: int, counts: int):
    choices = client.completions.create(model="tiny", prompt=PROMPT, seed=given, n=2).choices
    for at, choice in enumerate(choices):
        assert choice.text == text_of(llm, temperature=1.0, seed=(counts + at) % 2**32, max_tokens=16)


def test_a_seed_gives_the_same_text_under_load(client: Any, server: Server, llm: LLM):
    alone = [text_of(llm, temperature=1.0, seed=seed, max_tokens=20) for seed in range(12)]

    async def main() -> list[str]:
        async with async_client(server) as many:

            async def ask(seed: int) -> str:
                settings = ASK | {"temperature": 1.0, "max_tokens": 20, "seed": seed}
                if seed % 2:
                    stream = await many.completions.create(**settings, stream=True)
                    return "".join([one.choices[0].text async for one in stream])
                return (await many.completions.create(**settings)).choices[0].text

            return await asyncio.gather(*map(ask, range(12)))

    assert asyncio.run(main()) == alone


@pytest.mark.parametrize("more", [{}, {"stream": True}])
@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": -1}, "max_tokens", ""),
        ({"max_tokens": 1000}, "max_tokens", "leaves 78 of the 96 positions"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"n": 0}, "n", ""),
        ({"n": 2, "best_of": 3}, "best_of", "only n"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": ""}, None, "at least one token"),
        ({"prompt": [1, 99]}, None, "token at position 1 is 99"),
        ({"prompt": "a" * 200}, "prompt", "200 tokens, at most 96"),
        ({"prompt": ["a", 3]}, "prompt", ""),
        ({"prompt": None}, "prompt", ""),
        ({"stop": [""]}, None, "none empty"),
        *(({"logit_bias": {"1": 1, key: 1}}, "logit_bias", f"keys [{key!r}], expected token ids")
          for key in ("x", "01", "+1", " 1 ", "1_0", "\u0663", "-1")),
        ({"logit_bias": {"99": 1}}, None, "ids go from 0 to 36"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"seed": 2**63}, "seed", ""),
        ({"seed": -(2**63) - 1}, "seed", ""),
        ({"n": 2, "temperature": 0}, None, "same answer 2 times"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"priority": 2**31}, "priority", "less than"),
        ({"min_tokens": 5, "max_tokens": 2}, None, "min_tokens is 5"),
        ({"colour": "red"}, "colour", "unknown field `colour`"),
        ({"allowed_token_ids": []}, None, "at least one"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_400_that_names_the_field(
    http: httpx.Client, more: dict[str, Any], wrong: dict[str, Any], param: str | None, says: str
):
    found = http.post("/v1/completions", json=ASK | more | wrong)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


def test_options_of_streams_go_with_streams(http: httpx.Client):
    for wrong in ({"stream_options": {"include_usage": True}}, {"stream": True, "prompt_logprobs": 1}):
        assert http.post("/v1/completions", json=ASK | wrong).status_code == 400


def test_fields_that_change_nothing_are_accepted(client: Any, llm: LLM):
    more = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "best_of": 1, "priority": 0, "suffix": None}
    assert client.completions.create(**ASK, user="me", extra_body=more).choices[0].text == text_of(llm)


@pytest.mark.parametrize("stream", [True, False])
def test_a_long_answer_is_written_beside_the_event_loop(
    server: Server, client: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    threads: set[str] = set()
    text_of = server.service.vocabulary.text_of

    def watched(token: int, **more: Any) -> str:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return text_of(token, **more)

    monkeypatch.setattr(server.service.vocabulary, "text_of", watched)
    monkeypatch.setattr(completions, "LONG", 4)
    ask = ASK | {"logprobs": 1, "echo": True, "max_tokens": 1, "stream": stream}
    answer = client.completions.create(**ask)
    first = next(iter(answer)) if stream else answer
    assert first.choices[0].text.startswith(ASK["prompt"])
    assert "serve" in threads
    assert stream or threads == {"serve"}
