"""`ferrum-jax chat`: a conversation in a terminal."""

import builtins
import io
import string
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
from rich.console import Console

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.conversation import Conversation
from ferrum_jax.generate.tokenizer import Tokenizer
from tests.serve.models import Scripted, characters


class Talk:
    """A conversation whose lines are given, and what it printed and said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.model = Scripted(capacity=200)
        self.model.says("hello")
        self.llm = LLM.from_model(self.model, characters(), max_rows=1, chunk_tokens=64)
        self.prompts: list[str] = []
        chat_prompt = self.llm.chat_prompt

        def noted(*args: Any, **more: Any) -> list[int]:
            ids = chat_prompt(*args, **more)
            self.prompts.append(self.model.tokenizer.decode(ids, skip_special_tokens=False))
            return ids

        monkeypatch.setattr(self.llm, "chat_prompt", noted)
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def run(self, lines: Iterable[str | BaseException], system: str | None = None) -> tuple[str, str]:
        """Returns what was printed, and what was said beside it."""
        left = iter(lines)

        def read(_: str) -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        self._monkeypatch.setattr(builtins, "input", read)
        said = io.StringIO()
        Conversation(self.llm, SamplingParams(max_tokens=20), Console(file=said, width=300), system).run()
        return self._capsys.readouterr().out, said.getvalue()


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    return Talk(monkeypatch, capsys)


def test_what_was_said_is_kept_until_it_is_forgotten(talk: Talk):
    out, said = talk.run(["one", "", "two", "/undo", "three", "/reset", "four", "/exit", "five"])
    assert out == "hello\n" * 4
    first = "user:one<end>assistant:hello<end>"
    assert talk.prompts == [
        "user:one<end>assistant:<go>",
        f"{first}user:two<end>assistant:<go>",
        f"{first}user:three<end>assistant:<go>",
        "user:four<end>assistant:<go>",
    ]
    assert said.count("6 tokens · ") == 4
    assert "time to first token" in said
    assert "1 answers are kept" in said
    assert talk.model.tokens == {}


def test_the_system_message_goes_first_and_may_change(talk: Talk):
    talk.run(["one", "/system be  kind", "two", "/system", "three"], system="be brief")
    assert talk.prompts[0] == "system:be brief<end>user:one<end>assistant:<go>"
    assert talk.prompts[1].startswith("system:be  kind<end>user:one<end>")
    assert talk.prompts[2].startswith("user:one<end>")


def test_an_interrupt_ends_an_answer_and_keeps_what_there_is(talk: Talk, monkeypatch: pytest.MonkeyPatch):
    stream = talk.llm.stream

    class Interrupted:
        def __init__(self, *args: Any):
            self.inner = stream(*args)

        def __iter__(self) -> Any:
            yield next(self.inner)
            raise KeyboardInterrupt

        def close(self) -> None:
            self.inner.close()

    monkeypatch.setattr(talk.llm, "stream", Interrupted)
    _, said = talk.run([KeyboardInterrupt(), "one"])
    assert "interrupted" in said
    monkeypatch.setattr(talk.llm, "stream", stream)
    talk.run([])
    talk.llm.engine.settle()
    assert talk.model.tokens == {}


def test_unknown_commands_and_conversations_that_are_too_long_are_told(talk: Talk):
    out, said = talk.run(["/what [bold]", "/help", "x" * 300, "one"])
    assert "/what is no command" in said
    assert "/system TEXT" in said
    assert "RequestValidation error" in said
    assert out == "hello\n"
    assert talk.prompts[-1] == "user:one<end>assistant:<go>"


def test_a_line_that_is_no_text_is_told_and_the_next_one_read(talk: Talk, monkeypatch: pytest.MonkeyPatch):
    out, said = talk.run(["\udcff\udcfe hello", "one"])
    assert out == "hello\n"
    assert "this line is not" in said
    for stream in ("stdin", "stdout"):
        with monkeypatch.context() as closed:
            closed.setattr(sys, stream, None)
            assert talk.run(["one"])[0] == ""


def test_of_answers_in_channels_the_users_alone_is_the_answer(capsys: pytest.CaptureFixture[str]):
    marks = ("<|return|>", "<|go|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    letters = {one: at for at, one in enumerate(string.printable)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(one, special=True) for one in marks])
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant<|go|>"
    )
    ids = {one: len(letters) + at for at, one in enumerate(marks)}
    tokenizer = Tokenizer(backend=backend, eos_token_ids=(ids["<|return|>"],), chat_templates={"default": template})
    model = Scripted()
    model.tokenizer, model.end, model.go = tokenizer, ids["<|return|>"], ids["<|go|>"]
    model._sizes = replace(model._sizes, vocab_size=tokenizer.vocab_size)
    model.says("<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Paris.")
    llm, said = LLM.from_model(model, tokenizer, max_rows=1, chunk_tokens=64), io.StringIO()
    talk = Conversation(llm, SamplingParams(max_tokens=200), Console(file=said, width=300))
    talk._answer("Where?")
    assert capsys.readouterr().out == "Paris.\n"
    assert "Easy." in said.getvalue()
    assert talk._messages[-1] == {"role": "assistant", "content": "Paris."}
