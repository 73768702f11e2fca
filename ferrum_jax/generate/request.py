"""One request on its way through the engine."""

import time
from dataclasses import dataclass, field

from ferrum_jax.contract.errors import FerrumError
from ferrum_jax.contract.scoring import TokenScores
from ferrum_jax.generate.detokenize import Detokenizer
from ferrum_jax.generate.params import FinishReason, RequestOutput, SamplingParams
from ferrum_jax.generate.stops import StopWatcher


@dataclass(eq=False)
class Request:
    """A prompt, what was generated from it so far, and how far the model has read.

    Where tokens of the prompt are to be scored, the model reads up to the first of them, scores them, and reads on.
    """

    cache_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    limit: int  # tokens to generate at most
    detokenizer: Detokenizer | None
    watcher: StopWatcher
    tokens: list[int] = field(default_factory=list)  # prompt and answer
    num_read: int = 0  # tokens whose keys and values are in the KV
    score_from: int | None = None  # the first token of the prompt that is to be scored; None: none is
    scores: list[float] = field(default_factory=list)  # log-probabilities of the tokens from there on
    greedy_ids: list[int] = field(default_factory=list)  # the likeliest tokens there
    copies: list["Request"] = field(default_factory=list)  # that begin where the prompt, or what they share, is read
    logprobs: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)  # pieces; grows only, since another thread may be taking them
    num_taken: int = 0  # pieces of `text` that were taken
    drafted: int = 0  # tokens that were proposed and verified
    accepted: int = 0  # of those, the ones that stand in the answer
    finish_reason: FinishReason | None = None
    error: FerrumError | None = None
    is_torn: bool = False  # what was generated or scored last is half taken
    submitted: float = field(default_factory=time.perf_counter)
    first_token_after: float = 0.0  # seconds

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def is_done(self) -> bool:
        """True once it finished or failed."""
        return self.finish_reason is not None or self.error is not None

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt that are still to be scored."""
        return 0 if self.score_from is None else len(self.prompt) - self.score_from - len(self.scores)

    @property
    def unread(self) -> list[int]:
        """The tokens that an ordinary step may read next."""
        end = len(self.tokens) if self.num_unscored == 0 else (self.score_from or 0) - 1
        return self.tokens[self.num_read : end]

    @property
    def is_scoring(self) -> bool:
        """True while what comes next is to be scored."""
        return self.num_unscored > 0 and not self.unread

    @property
    def answer(self) -> list[int]:
        """The ids generated so far."""
        return self.tokens[len(self.prompt) :]

    def append(self, token: int, logprob: float | None) -> None:
        """Takes the next generated token and decides whether it was the last."""
        self.is_torn = True
        self._take(token, logprob)
        self.is_torn = False

    def _take(self, token: int, logprob: float | None) -> None:
        if len(self.tokens) == len(self.prompt):
            self.first_token_after = time.perf_counter() - self.submitted
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token in self.stop_ids:
            self._finish("stop")
            return
        if self.detokenizer is not None:
            self._emit(self.watcher.push(self.detokenizer.push(token)))
        if self.watcher.found:
            self.finish_reason = "stop"
        elif len(self.answer) >= self.limit:
            self._finish("length")

    def take_scores(self, scores: TokenScores) -> None:
        """Takes the scores of the next tokens of the prompt, after the last of which one without an answer is done."""
        self.is_torn = True
        self.num_read += len(scores.logprobs)
        self.scores += scores.logprobs.tolist()
        self.greedy_ids += scores.greedy_ids.tolist()
        if self.num_unscored == 0 and self.limit == 0:
            self.finish_reason = "length"
        self.is_torn = False

    def read_anew(self) -> None:
        """Begins again with a KV that holds nothing; what was generated stays, and scores if they are complete."""
        self.num_read = 0
        if self.num_unscored:
            self.scores, self.greedy_ids = [], []

    def take_text(self) -> str:
        """Gives the text that became final since the last time."""
        taken = self.text[self.num_taken :]
        self.num_taken += len(taken)
        return "".join(taken)

    def output(self, *, return_error: bool = False) -> RequestOutput:
        """Gives the finished request's output; raises what made it fail, or gives that in the output as well."""
        if self.error is not None and not return_error:
            raise self.error
        reason = self.finish_reason if self.error is None else "error"
        assert reason is not None
        return RequestOutput(
            prompt_token_ids=self.prompt,
            token_ids=self.answer,
            text="".join(self.text),
            finish_reason=reason,
            logprobs=self.logprobs if self.params.logprobs else None,
            prompt_logprobs=[None, *self.scores] if self.params.prompt_logprobs else None,
            time_to_first_token=self.first_token_after,
            error=self.error,
            drafted=self.drafted,
            accepted=self.accepted,
        )

    def _finish(self, reason: FinishReason) -> None:
        if self.detokenizer is not None:
            self._emit(self.watcher.push(self.detokenizer.flush()))
            self._emit(self.watcher.flush())
        self.finish_reason = "stop" if self.watcher.found else reason

    def _emit(self, piece: str) -> None:
        if piece:
            self.text.append(piece)
