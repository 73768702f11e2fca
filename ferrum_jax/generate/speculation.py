"""Whether and how an `LLM` speculates."""

import os
from dataclasses import dataclass, replace
from typing import Any

from ferrum_jax.config import EngineConfig
from ferrum_jax.contract.checks import check_int
from ferrum_jax.contract.errors import ConfigError, InvalidParameterError
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.drafts import DraftSource, PromptLookup
from ferrum_jax.generate.model_draft import Drawing, ModelDraft, check_drawing
from ferrum_jax.loading import load
from ferrum_jax.weights.hub import resolve

PROMPT_LOOKUP = "prompt-lookup"
DEFAULT_TOKENS = 4
DRAFT_SETTINGS = EngineConfig(spec_tokens=0, mesh={})  # a draft model drafts nothing itself, and is on one device


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The source of drafts, and how many tokens it drafts at a time.

    Args:
        draft: `prompt-lookup`; or the path or Hugging Face id of a smaller model with the same vocabulary; or such a
            model, which is then not closed with the `LLM`; or any `DraftSource`.
        num_tokens: tokens drafted at a time; if None, the engine's `spec_tokens`, `FERRUM_SPEC_N` or 4.
        max_ngram: for prompt lookup: the longest n-gram that is looked up.
        drawing: for a draft model: how it drafts for requests that sample, see `ModelDraft`.
    """

    draft: str | os.PathLike[str] | DecoderOnlyLLM | DraftSource = PROMPT_LOOKUP
    num_tokens: int | None = None
    max_ngram: int = 3
    drawing: Drawing = "shared"

    def __post_init__(self):
        if not isinstance(self.draft, (str, os.PathLike, DecoderOnlyLLM, DraftSource)):
            raise InvalidParameterError(
                f"draft is a {type(self.draft).__name__}, expected {PROMPT_LOOKUP!r}, a path, a model or a DraftSource"
            )
        check_drawing(self.drawing)
        for name in ("max_ngram", "num_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, InvalidParameterError)
        if isinstance(self.draft, DraftSource) and self.num_tokens not in (None, self.draft.num_tokens):
            raise ConfigError(f"num_tokens is {self.num_tokens}, the draft's own is {self.draft.num_tokens}")

    @property
    def asked_tokens(self) -> int | None:
        """Tokens drafted at a time, if they are given here."""
        return self.draft.num_tokens if isinstance(self.draft, DraftSource) else self.num_tokens

    def settle(self, engine: EngineConfig | None) -> EngineConfig:
        """Returns the engine's settings with `spec_tokens` filled in.

        Raises:
            ConfigError: `num_tokens` here and `spec_tokens` there differ.
        """
        asked, mine = engine or EngineConfig(), self.asked_tokens
        if mine is not None and asked.spec_tokens not in (None, mine):
            raise ConfigError(f"num_tokens is {mine}, spec_tokens of the engine is {asked.spec_tokens}: give it once")
        found = asked.over(EngineConfig.from_environment()).spec_tokens
        return replace(asked, spec_tokens=mine or found or DEFAULT_TOKENS)

    def tokens_for(self, target: DecoderOnlyLLM) -> int:
        """Returns how many tokens to draft at a time for a model that was loaded without this number."""
        most = DEFAULT_TOKENS
        if isinstance(target, ModelRunner):
            most = max(1, min(most, target.plan.buckets.verify_tokens - 1))
        return self.asked_tokens or most


def make_drafts(
    speculation: Speculation, target: DecoderOnlyLLM, num_tokens: int, max_rows: int, *, progress: bool = True
) -> DraftSource | None:
    """Makes the source of drafts for a target, and loads a draft model if it needs one; None if `num_tokens` is 0.

    Raises:
        ConfigError: the target's steps cannot verify so many tokens.
        FerrumError: the draft model cannot be loaded.
    """
    draft, drawing = speculation.draft, speculation.drawing
    if num_tokens == 0:
        return None
    if isinstance(target, ModelRunner) and num_tokens >= (most := target.plan.buckets.verify_tokens):
        raise ConfigError(
            f"{num_tokens} tokens are to be drafted at a time, expected at most {most - 1}: steps of this model verify "
            f"{most} tokens of a sequence; load it with verify_tokens={num_tokens + 1}, block_tokens at least as large"
        )
    if isinstance(draft, DraftSource):
        return draft
    if isinstance(draft, DecoderOnlyLLM):
        return ModelDraft(draft, num_tokens, drawing=drawing)
    if draft == PROMPT_LOOKUP:
        return PromptLookup(speculation.max_ngram, num_tokens)
    seqs, device = (target.plan.max_seqs, target.device) if isinstance(target, ModelRunner) else (max_rows, None)
    capacity = target.kv_capacity()
    how: dict[str, Any] = {"max_seqs": seqs, "kv_capacity": capacity, "device": device, "engine": DRAFT_SETTINGS}
    if isinstance(target, ModelRunner):  # keeps its compiled steps where the target's are, or nowhere
        how["artifacts"] = False if target.artifacts is None else target.artifacts.root
    model = load(resolve(draft, progress=progress), progress=progress, **how)
    return ModelDraft(model, num_tokens, drawing=drawing, is_owner=True)
