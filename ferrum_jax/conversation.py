"""`ferrum-jax chat`: a conversation in a terminal."""

import contextlib
import io
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from ferrum_jax import cli_options
from ferrum_jax.contract.errors import FerrumError, UnsupportedError
from ferrum_jax.serve.tools.choice import choose_format
from ferrum_jax.serve.tools.events import Content, Event, Reasoning

HELP = """/system TEXT  say what the model is told first; without a text, nothing
/reset        forget the conversation
/undo         forget the last question and its answer
/help         say this
/exit         end, as an end of input does; an interrupt ends an answer"""


def chat(
    model: cli_options.ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="System message")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Draw among the k best; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the nucleus of this probability; 1 is off")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Draw among tokens this likely relative to the best; 0 is off")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes draws repeatable")] = None,
    kv_capacity: cli_options.CapacityOption = None,
    memory_fraction: cli_options.MemoryOption = None,
    dtype: cli_options.DtypeOption = None,
    device: cli_options.DeviceOption = None,
    mesh: cli_options.MeshOption = None,
    quantize: cli_options.QuantizeOption = None,
    layout: cli_options.LayoutOption = None,
    tokenizer: cli_options.TokenizerOption = None,
    speculate: cli_options.SpeculateOption = None,
) -> None:
    """Converse with a model; /help lists what can be typed."""
    given = locals()
    from ferrum_jax.config import EngineConfig
    from ferrum_jax.generate.llm import LLM
    from ferrum_jax.generate.params import SamplingParams
    from ferrum_jax.generate.speculation import Speculation

    cli_options.check_texts({"--system": system})
    params = SamplingParams(**cli_options.options_of(SamplingParams, given))
    speculation = None if speculate is None else Speculation(num_tokens=speculate)
    beside: dict[str, Any] = {"device": device, "tokenizer": tokenizer, "speculation": speculation}
    beside |= {"max_seqs": 1, "prefix_cache": cli_options.reuses_prefixes(None)}
    with LLM(model, **beside, **cli_options.options_of(EngineConfig, given)) as llm:
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise UnsupportedError("this model has no chat template: use `ferrum-jax generate`")
        console = Console(stderr=True)
        Conversation(llm, params, console, system).run()


class Conversation:
    """What was said so far, and the model that goes on."""

    def __init__(self, llm: Any, params: Any, console: Console, system: str | None = None):
        """Takes an `LLM`, how it answers, and where figures and errors go."""
        self._llm, self._params, self._console = llm, params, console
        self._system = system
        self._messages: list[dict[str, str]] = []

    def run(self) -> None:
        """Answers lines of standard input until it ends."""
        if sys.stdin is None or sys.stdout is None:  # it is closed
            return
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")
        self._say("/help lists the commands")
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                continue
            if line in ("/exit", "/quit"):
                return
            if any("\ud800" <= letter <= "\udfff" for letter in line):
                self._say(f"this line is not {sys.stdin.encoding}")
            elif line.startswith("/"):
                self._obey(line)
            elif line:
                self._answer(line)

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        match command:
            case "/system":
                self._system = rest.strip() or None
                self._say("the system message is set" if self._system else "there is no system message")
            case "/reset":
                self._messages.clear()
                self._say("the conversation is forgotten")
            case "/undo":
                del self._messages[-2:]
                self._say(f"{len(self._messages) // 2} answers are kept")
            case "/help":
                self._say(HELP)
            case _:
                self._say(f"{command} is no command: /help lists them")

    def _answer(self, line: str) -> None:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        asked = {"role": "user", "content": line}
        pieces: list[str] = []
        try:
            ids = self._llm.chat_prompt([*system, *self._messages, asked])
            print_answer(self._llm, ids, self._params, self._console, pieces)
        except KeyboardInterrupt:
            print(flush=True)
            self._say("the answer was interrupted")
        except FerrumError as problem:  # a conversation that is too long, perhaps
            self._say(f"{problem.kind} error: {problem}")
            return
        self._messages += [asked, {"role": "assistant", "content": "".join(pieces)}]

    def _say(self, text: str) -> None:
        _print_dim(self._console, text)


def print_answer(llm: Any, prompt: Any, params: Any, console: Console, pieces: list[str]) -> None:
    """Prints an answer as it comes, then on `console` how long it took; `pieces` receives what was printed.

    For GPT-OSS, whose answers are messages in channels, it prints those for the user, and the reasoning on `console`.
    """
    template = None if llm.tokenizer is None else llm.tokenizer.chat_template
    found = choose_format("auto", template)
    reader = found.make((), False) if found is not None and found.is_always_on and not isinstance(prompt, str) else None
    if reader is not None:
        params = replace(params, skip_special_tokens=False)

    def show(events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                pieces.append(event.text)
                print(event.text, end="", flush=True)
            elif isinstance(event, Reasoning):
                console.print(event.text, style="dim", markup=False, highlight=False, soft_wrap=True, end="")

    with console.status("compiling the steps this prompt needs"):
        llm.prepare(prompt, params)
    with contextlib.closing(llm.stream(prompt, params)) as stream:
        started = time.perf_counter()
        for piece in stream:
            show([Content(piece)] if reader is None else reader.push(piece))
        show([] if reader is None else reader.finish())
        print(flush=True)
        _print_dim(console, _figures(stream.output(), time.perf_counter() - started))


def _print_dim(console: Console, text: str) -> None:
    console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def _figures(output: Any, seconds: float) -> str:
    """Says how long an answer took."""
    count, first = len(output.token_ids), output.time_to_first_token
    rate = f"{(count - 1) / max(1e-9, seconds - first):.1f} tokens/s" if count > 1 else "one token"
    agreed = f" · {output.accepted} of {output.drafted} drafted tokens accepted" if output.drafted else ""
    return (
        f"{count} tokens · {rate} · time to first token {first * 1e3:.0f} ms "
        f"({len(output.prompt_token_ids)} prompt tokens) · {output.finish_reason}{agreed}"
    )
