"""A model for EleutherAI's lm-evaluation-harness (extra `eval`).

`python -m ferrum_jax.integrations.lm_eval --model ferrum_jax --model_args pretrained=PATH --tasks …` is the harness's
own command line with this model registered. For `lm_eval.simple_evaluate`, importing this module registers it.
"""

# pyright: reportMissingImports=false
import importlib
import logging
from collections.abc import Sequence
from typing import Any

from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from ferrum_jax.config import EngineConfig
from ferrum_jax.contract.errors import (
    ConfigError,
    RequestValidationError,
    TokenizerError,
    UnsupportedError,
    safe_repr,
)
from ferrum_jax.generate.intake import capacity_of
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.prompts import Prompt

_log = logging.getLogger(__name__)
SEQUENCES = 8  # scored or generated together, if no batch size is given
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given counts
DRAWING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}

importlib.import_module("lm_eval.models")  # the harness registers its own models only if none is registered yet

Encoded = tuple[tuple[str, str], list[int], list[int]]  # context and continuation, as text and as ids


@register_model("ferrum_jax")
class FerrumLM(TemplateLM):
    """Scores and generates with `LLM`."""

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        **settings: Any,
    ):
        """Loads a model.

        Args:
            pretrained: a folder, a `.gguf` file or a Hugging Face id; the default model if None.
            batch_size: sequences that run together; 1, the harness's default, and `auto` mean 8.
            max_batch_size: an upper bound of `batch_size`.
            device: `cpu`, `tpu:0`, …; None, and `cuda:0`, the harness's default, mean JAX's default device, which is
                this GPU if there is one.
            max_length: positions of a sequence; longer contexts lose their beginning. If None, `ferrum_jax.load`
                chooses it.
            max_gen_toks: the most tokens to generate if a task does not say.
            add_bos_token: begin every text with the BOS token; as the tokenizer does if None.
            **settings: as for `ferrum_jax.load`.
        """
        super().__init__()
        rows = settings.pop("max_seqs", None) or _num_rows(batch_size, max_batch_size)
        capacity = settings.pop("kv_capacity", max_length)
        if max_length not in (None, capacity):
            raise ConfigError(f"max_length is {max_length} and kv_capacity {capacity}: they are the same, give one")
        short = (1, rows) if rows > 1 else (1,)  # continuations of a few tokens, all of them in one step
        engine = settings.pop("engine", None)
        if engine is None:
            engine = EngineConfig(verify_blocks=short, prefix_cache=settings.pop("prefix_cache", True))
        place = None if device in ("cuda", "cuda:0") else device
        self.llm = LLM(pretrained, max_seqs=rows, kv_capacity=capacity, device=place, engine=engine, **settings)
        self.tokenizer: Any = self.llm.tokenizer
        self.max_length = capacity_of(self.llm.model)
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._name = str(pretrained or self.llm.runner.name)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        if not self.tokenizer.eos_token_ids:
            raise UnsupportedError("this tokenizer has no token that ends a text, which the harness needs")
        return self.tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that is scored from its first token."""
        bos = self.tokenizer.bos_token
        found = None if bos is None else self.tokenizer.backend.token_to_id(bos)
        return self.eot_token_id if found is None else found

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in the harness's cache of requests."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Returns the ids of a text; never adds a second BOS token."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            has_one = bool(bos) and string.startswith(bos)
            add_special_tokens = not has_one and self._add_bos_token is not False
            if self._add_bos_token and not has_one:
                ids = self.tokenizer.encode(string)
                return ids if ids[:1] == [self.prefix_token_id] else [self.prefix_token_id, *ids]
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders a conversation by the chat template; without a generation prompt, the last message is left open.

        If the template refuses the conversation, this leaves out the system prompt, as the harness's own backends do.
        """
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return self.tokenizer.render(chat_history, **options)
        except TokenizerError as problem:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            _log.warning("%s: rendering the conversation without its system prompt", problem)
            return self.tokenizer.render(others, **options)

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Scores continuations; a context that is too long loses its beginning."""
        befores: list[Prompt] = []
        afters: list[Prompt] = []
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise RequestValidationError(
                    f"a continuation has {len(continuation)} tokens, expected 1 to max_length, {self.max_length}"
                )
            befores.append(context[-(self.max_length + 1 - len(continuation)) :])  # the last token takes no position
            afters.append(continuation)
        answers = []
        scores = self.llm.score(befores, afters, progress=not disable_tqdm) if befores else []
        for (texts, _, _), score in zip(requests, scores, strict=True):
            answers.append((score.total, score.is_greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts; one longer than `max_length` in windows, each with one token of context."""
        windows, owners = [], []
        for at, request in enumerate(requests):
            for pair in utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *utils.make_disjoint_window(pair)))
                owners.append(at)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generates answers that end before a text of `until`, or after `max_gen_toks` tokens."""
        prompts: list[Prompt] = []
        params: list[SamplingParams] = []
        for request in requests:
            context, asked = request.arguments
            how = self._params(asked)
            room = self.max_length - (how.max_tokens or 0)
            if room < 1:
                raise RequestValidationError(f"max_gen_toks is {how.max_tokens}, the maximal length {self.max_length}")
            prompts.append((self.tok_encode(context) or [self.prefix_token_id])[-room:])
            params.append(how)
        texts = [out.text for out in self.llm.generate(prompts, params, progress=not disable_tqdm)] if prompts else []
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _params(self, asked: dict[str, Any]) -> SamplingParams:
        """Converts a task's generation arguments; raises UnsupportedError for an unknown one or for beams."""
        given = dict(asked)
        until, draws, beams = given.pop("until", None) or (), given.pop("do_sample", None), given.pop("num_beams", None)
        lengths = [given.pop(name, None) for name in LENGTHS]
        limit = next((length for length in lengths if length is not None), self.max_gen_toks)
        if beams not in (None, 1):
            raise UnsupportedError(f"num_beams is {safe_repr(beams)}, there is no beam search")
        if unknown := sorted(given.keys() - DRAWING):
            known = ", ".join(sorted({*DRAWING, *LENGTHS, "until", "do_sample", "num_beams"}))
            raise UnsupportedError(f"generation arguments {unknown} are unknown, known are {known}")
        drawing = {name: value for name, value in given.items() if value is not None}
        if draws is False:
            drawing = {name: value for name, value in drawing.items() if name == "repetition_penalty"}
        elif draws:
            drawing.setdefault("temperature", 1.0)
        return SamplingParams(max_tokens=limit, stop=[until] if isinstance(until, str) else list(until), **drawing)


def _num_rows(batch_size: int | str, most: int | None) -> int:
    try:
        asked = SEQUENCES if str(batch_size).startswith("auto") else int(batch_size)
    except ValueError:
        raise ConfigError(f"batch_size is {safe_repr(batch_size)}, expected an integer or auto") from None
    rows = SEQUENCES if asked == 1 else asked
    return rows if most is None else min(rows, int(most))


if __name__ == "__main__":
    cli_evaluate()
