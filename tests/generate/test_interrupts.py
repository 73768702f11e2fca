"""Interrupts at every point of a step where Python looks for them: whoever asked beside it gets their answer."""

import dis
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.contract.errors import CancelledError
from ferrum_jax.generate import engine, forwards, request
from ferrum_jax.generate.request import Request
from tests.fake import CountingLLM, SummingLLM

LOOKS = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "POP_JUMP_BACKWARD_IF_TRUE"}
WATCHED = {str(Path(module.__file__ or "")) for module in (engine, forwards, request)}
MOST_STEPS = 60


class Interrupt:
    """Raises KeyboardInterrupt once, at the so-manieth look for a signal in the watched files."""

    def __init__(self, at: int):
        self.was_raised = False
        self._left = at
        self._last: tuple[FrameType, str] | None = None

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            self._last = None
            if frame.f_code.co_filename not in WATCHED:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            last, self._last = self._last, (frame, dis.opname[frame.f_code.co_code[frame.f_lasti]])
            if last is not None and last[0] is frame and last[1] in LOOKS:
                self._left -= 1
                if self._left == 0:
                    self.was_raised = True
                    raise KeyboardInterrupt
        return self.trace


@contextmanager
def interrupted(at: int) -> Iterator[Interrupt]:
    """Interrupts what is done inside; says whether it was."""
    interrupt, before = Interrupt(at), sys.gettrace()
    sys.settrace(interrupt.trace)
    try:
        yield interrupt
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def ask(llm: LLM, copies: int) -> list[Request]:
    """Makes the requests of one prompt, as another thread would before it waits."""
    return llm._requests([2, 0, 1, 4, 5], SamplingParams(max_tokens=5, n=copies, logprobs=True))


@pytest.mark.parametrize(("kind", "copies"), [(CountingLLM, 1), (SummingLLM, 2)])
def test_an_interrupt_anywhere_leaves_others_their_answers(kind: type[CountingLLM | SummingLLM], copies: int):
    def made() -> tuple[LLM, CountingLLM | SummingLLM]:
        model = kind()
        return LLM.from_model(model, max_rows=copies + 1, chunk_tokens=4), model

    llm, _ = made()
    alone = ask(llm, copies)
    llm._finish([alone], None)
    at, torn = 1, 0
    while True:
        llm, model = made()
        group = ask(llm, copies)
        llm._engine.submit(group[0])
        with interrupted(at) as interrupt:
            llm.generate([[1, 2], [3]], SamplingParams(max_tokens=4, n=copies, logprobs=True))
        if not interrupt.was_raised:
            break
        for _ in range(MOST_STEPS):
            if all(one.is_done for one in group):
                break
            llm._engine.step()
        for one, expected in zip(group, alone, strict=True):
            if one.error is None:
                assert (one.answer, len(one.logprobs)) == (expected.answer, len(expected.logprobs)), at
            else:
                torn += 1
                assert isinstance(one.error, CancelledError), at
                assert one.is_torn, at
        assert llm.generate([[7]], SamplingParams(max_tokens=1))[0].token_ids, at
        assert (model.lengths if isinstance(model, CountingLLM) else model.tokens) == {}, at
        assert not llm._engine._running, at
        at += 1
    assert at > 300, "the points were found"
    assert torn < at / 10, "an interrupt in the middle of taking a token is rare"
