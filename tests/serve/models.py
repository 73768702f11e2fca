"""Tokenizers of single characters, and a model that says what it is told to say."""

import string
import threading
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ferrum_jax.contract import DecoderOnlyLLM, LlmRuntimeConfig
from ferrum_jax.contract.llm import Logits
from ferrum_jax.generate.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}{{ prefix }}assistant:<go>{% endif %}"
)
SPECIAL = ("<end>", "<go>")


def spelled(vocab_size: int) -> Tokenizer:
    """A vocabulary of letters and little else, the last ids of which end an answer or begin one."""
    letters = [*string.ascii_lowercase, " ", ".", ":", ",", "!", "?", "'", "-", "\n"][: vocab_size - len(SPECIAL)]
    return _tokenizer(letters)


def json_letters(vocab_size: int) -> Tokenizer:
    """A vocabulary that can spell some JSON, of bytes, so that answers may have a form."""
    letters = [*"abcdefghijklmnop", *'"{}[]:,.-0123', "\u0120", "\u010a", *"rstu"][: vocab_size - len(SPECIAL)]
    made = _tokenizer(letters)
    made.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.backend.decoder = decoders.ByteLevel()
    return made


def characters() -> Tokenizer:
    """Every printable character, and a mark of GPT-OSS that is a special token."""
    return _tokenizer(list(string.printable), "<|channel|>")


def _tokenizer(letters: list[str], *more: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(letters)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(one, special=True) for one in (*SPECIAL, *more)])
    return Tokenizer(backend=backend, eos_token_ids=(len(letters),), chat_templates={"default": TEMPLATE})


class Scripted(DecoderOnlyLLM):
    """Says its script after the last `<go>`, and then `<end>`; a forward waits for its gate."""

    def __init__(self, capacity: int = 4096):
        self.tokenizer = characters()
        self.end, self.go = (self.tokenizer.token_to_id(one) for one in SPECIAL)
        self.script: list[int] = []
        self.tokens: dict[str, list[int]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self._sizes = LlmRuntimeConfig(
            hidden_size=1, num_layers=1, num_kv_heads=1, head_dim=2, vocab_size=self.tokenizer.vocab_size,
            max_seq_len=capacity,
        )  # fmt: skip

    def says(self, text: str) -> None:
        self.script = self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def config(self) -> LlmRuntimeConfig:
        return self._sizes

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        self.entered.set()
        assert self.gate.wait(timeout=60)
        held = self.tokens.setdefault(cache_id, [])
        held.extend(map(int, tokens))
        said = held[::-1].index(self.go) if self.go in held else 0
        logits = np.full(self._sizes.vocab_size, -9.0, np.float32)
        logits[self.script[said] if said < len(self.script) else self.end] = 9.0
        return logits

    def decode(self, cache_id: str, token: int, pos: int) -> Logits:
        return self.prefill(cache_id, [token])

    def release(self, cache_id: str) -> None:
        self.tokens.pop(cache_id, None)
