"""Continuous batching: requests join and leave a running batch, prompts are read in chunks beside decodes."""

import contextlib
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ferrum_jax.contract.errors import (
    CancelledError,
    FerrumError,
    RequestValidationError,
    ResourceExhaustedError,
    UnsupportedError,
)
from ferrum_jax.contract.llm import DecoderOnlyLLM, Logits, ScoreRow, UnifiedRow
from ferrum_jax.generate import bursts
from ferrum_jax.generate.collecting import is_collecting, watch_collector
from ferrum_jax.generate.drafts import DraftSource
from ferrum_jax.generate.forwards import Forwards
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.request import Request
from ferrum_jax.generate.sampler import Sampler, artifacts_of
from ferrum_jax.generate.speculator import Speculator


class Engine:
    """Runs requests on any `DecoderOnlyLLM`.

    It has no thread of its own: whoever waits for a request calls `step`, which advances all of them. When slots or
    blocks run short, the request that joined last gives its place up and is read anew later: its answer stays the same.
    """

    def __init__(self, model: DecoderOnlyLLM, *, max_rows: int, chunk_tokens: int, drafts: DraftSource | None = None):
        """Gets ready; with `drafts`, what they propose is verified beside the ordinary rows of a step.

        Raises:
            UnsupportedError, ConfigError: drafts and model do not go together, as `Speculator` says.
        """
        self.model = model
        rows = max_rows * (1 if drafts is None else drafts.num_tokens + 1)
        self.sampler = Sampler(model.config.vocab_size, rows, artifacts_of(model))
        self.speculator = None if drafts is None else Speculator(model, drafts, self.sampler)
        self._max_rows = max_rows
        self._room = max_rows  # rows admitted; fewer after the KV ran short, until a request ends
        self._chunk_tokens = chunk_tokens
        self._lock = threading.RLock()  # so that who gives a request up in the middle of their own step does not wait
        self._is_busy = False  # who holds the lock is in the middle of what nothing may come between
        self._is_cut = False  # that did not come to its end
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._dropped: deque[Request] = deque()  # given up, and not forgotten yet
        self._left: deque[str] = deque()  # ids that are to be released
        self._forwards = Forwards(model)
        self._name = secrets.token_hex(4)
        self._numbers = itertools.count()
        watch_collector()

    def warmup(self, *, progress: bool = True) -> None:
        """Compiles what choosing and drafting may need; the model's own steps are its owner's business."""
        source = None if self.speculator is None else self.speculator.source
        self.sampler.warmup(distributions=source is not None and source.has_probabilities)
        if source is not None:
            source.warmup(progress=progress)

    def prepare(self, cache_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Compiles what choosing and verifying need for one request; the caller releases `cache_id` afterwards."""
        if self.speculator is None:
            self.sampler.prepare(params)
        else:
            self.speculator.prepare(cache_id, prompt, params)

    def new_cache_id(self) -> str:
        """Gives an id that no other request has."""
        return f"generate-{self._name}-{next(self._numbers)}"

    def submit(self, request: Request) -> None:
        """Queues a request."""
        request.submitted = time.perf_counter()
        with self._lock:
            self._waiting.append(request)

    def abort(self, *requests: Request) -> None:
        """Forgets requests and frees what they hold; one that is done already is no error.

        It waits for no step that runs, whose end frees them, so a signal's handler may call it, or whatever else comes
        in the middle of a step of this very thread. The garbage collector may call this at any point, in the middle of
        a call of the model, say: what it gives up holds its place until the next call here.
        """
        self._dropped.extend(requests)
        if not is_collecting():
            self.forget_dropped()

    def forget_dropped(self) -> None:
        """Frees what was given up; during a step of any thread, its end does."""
        while self._dropped and not self._is_busy:
            with self._lock:
                if not self._is_busy:
                    self._exclusively()

    def step(self) -> None:
        """Runs one forward for as many requests as fit and hands each its next token, or several.

        Several, in one call of the model, where it has loops and every prompt is read. Prompts that are being scored
        advance in a call of their own.

        Requests for which something was drafted are verified in a forward of their own and get one token or more.

        Where the model refuses the batch for what one request asks, the requests run one by one and only those that it
        refuses alone fail. Any other error of the model is stored in every request of the batch. The owners raise it.
        After anything else, an interrupt say, all that run are read anew; one whose token was just being
        taken fails.
        """
        self._alone(self._step)

    def reset(self) -> None:
        """Resets the model; running requests are read anew by the next step, so that their answers stay the same."""
        self._alone(self._reset)

    def _alone(self, work: Callable[[], None]) -> None:
        try:
            with self._lock:
                if self._is_busy:
                    raise RequestValidationError("an LLM was called in the middle of a step of the same thread")
                self._exclusively(work)
        finally:
            self.forget_dropped()

    def _exclusively(self, work: Callable[[], None] | None = None) -> None:
        """Frees what was given up, does what nothing else of this thread may come between, and frees again."""
        try:
            self._is_busy = True
            self._forget_dropped()
            if work is not None:
                self._is_cut = True
                work()
                self._is_cut = False
        finally:
            try:
                self._forget_dropped()
            finally:
                self._is_busy = False

    def _mend(self) -> None:
        """Reads everything anew after a step that was cut in two; what it moved may stand in both places."""
        for request in list(self._running):
            request.copies = [copy for copy in request.copies if copy not in (*self._running, *self._waiting)]
            if request.is_torn and not request.is_done:
                problem = f"{request.cache_id!r} was cut off while it took what was generated: ask again"
                self._fail([request], CancelledError(problem))
        self._read_anew(self._running)
        self._leave_if_done(list(self._running))

    def _step(self) -> None:
        self._admit()
        if self._running:
            self._attempt(list(self._running))

    def _reset(self) -> None:
        self.model.reset()
        self._read_anew(self._running)
        self._room = self._max_rows
        if self.speculator is not None:
            self.speculator.source.reset()

    def _attempt(self, batch: Sequence[Request]) -> None:
        try:
            self._advance(batch)
        except ResourceExhaustedError as problem:
            self._make_room(problem)
        except FerrumError as problem:
            if not problem.is_client_error:
                self._fail(self._running, problem)
            elif len(batch) == 1:
                self._fail(batch, problem)
            else:
                self._attempt_singly(batch)

    def _attempt_singly(self, batch: Sequence[Request]) -> None:
        goals = [request.num_read + 1 for request in batch]
        self._read_anew([request for request in batch if self._may_have_advanced(request)])
        for request, goal in zip(batch, goals, strict=True):
            # It may fail, finish, or give its place up. Short of the goal, the next batch would be refused as this was.
            while request in self._running and request.num_read < goal:
                self._attempt([request])

    def _advance(self, batch: Sequence[Request]) -> None:
        if scoring := [request for request in batch if request.is_scoring]:
            self._leave_if_done(self._score(scoring))
            batch = [request for request in batch if request not in scoring]
        if self.speculator is not None:
            ahead = self.speculator.advance([request for request in batch if not request.copies])
            self._leave_if_done(ahead)
            batch = [request for request in batch if request not in ahead]
        if not batch:
            return
        if self.speculator is None and bursts.advance(self.model, batch, until_one_ends=bool(self._waiting)):
            self._leave_if_done(batch)
            return
        rows, logits = self._forward(batch)
        ready = [(request, row) for request, row in zip(rows, logits, strict=True) if row is not None]
        ready += [(copy, row) for request, row in ready for copy in self._fork(request)]
        if ready:
            choices = self.sampler.choose([request for request, _ in ready], [row for _, row in ready])
            for (request, _), (token, logprob) in zip(ready, choices, strict=True):
                request.append(token, logprob)
        self._leave_if_done([request for request, _ in ready])

    def _score(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Scores the next tokens of prompts, which share `chunk_tokens`, oldest first.

        Copies that generate nothing have another text after the same prompt: they part here.
        """
        requests = [*requests, *(copy for request in requests if request.limit == 0 for copy in self._fork(request))]
        budget = self._chunk_tokens
        rows: list[Request] = []
        items: list[ScoreRow] = []
        for request in requests:
            end = request.num_read + min(request.num_unscored, budget)
            if end > request.num_read:
                budget -= end - request.num_read
                rows.append(request)
                tokens = request.prompt[request.num_read : end + 1]
                items.append((request.cache_id, tokens[:-1], tokens[1:]))
        for request, scores in zip(rows, self.model.score_batch(items), strict=True):
            request.take_scores(scores)
        return rows

    def _fork(self, request: Request) -> list[Request]:
        """Lets copies start from where a request has read; those for which there is no room wait to be read alone."""
        for copy in request.copies:
            copy.scores, copy.greedy_ids = list(request.scores), list(request.greedy_ids)
        running: list[Request] = []
        while request.copies and len(self._running) < self._room:
            copy = request.copies[0]
            self._running.append(copy)  # before its sequence is there: an interrupt leaves none that nobody knows of
            request.copies.pop(0)
            try:
                if request.num_read:  # otherwise there is nothing to share
                    self.model.fork(request.cache_id, copy.cache_id)
            except (ResourceExhaustedError, UnsupportedError):
                request.copies.insert(0, copy)
                self._running.remove(copy)
                break
            copy.num_read = request.num_read
            running.append(copy)
        self._waiting.extendleft(reversed(request.copies))
        request.copies = []
        return running

    def _forget_dropped(self) -> None:
        if self._is_cut:
            try:
                self._mend()
            except Exception:  # of a model that breaks the contract: said once
                self._is_cut = False
                raise
            self._is_cut = False
        self._release_left()
        while self._dropped:
            request = self._dropped[0]  # an interrupt leaves it there for the next call
            if request in self._running:
                self._leave(request)
            if request in self._waiting:
                self._waiting.remove(request)
            self._dropped.popleft()

    def _admit(self) -> None:
        while self._waiting and ((is_in := self._waiting[0] in self._running) or len(self._running) < self._room):
            if not is_in:  # an interrupt came between these two
                self._running.append(self._waiting[0])
            self._waiting.popleft()

    def _forward(self, batch: Sequence[Request]) -> tuple[list[Request], list[Logits | None]]:
        """Gives every request of the batch its share of the step; prompts share `chunk_tokens`, oldest first."""
        budget = self._chunk_tokens
        rows: list[Request] = []
        items: list[UnifiedRow] = []
        for request in batch:
            unread = request.unread
            count = len(unread) if len(unread) == 1 else min(len(unread), budget)
            if count == 0:
                continue
            if len(unread) > 1:
                budget -= count
            rows.append(request)
            is_final = request.num_read + count == len(request.tokens)
            items.append((request.cache_id, unread[:count], request.num_read, is_final))
        logits = self._forwards.run(items)
        for request, (_, tokens, _, _) in zip(rows, items, strict=True):
            request.num_read += len(tokens)
        return rows, logits

    def _make_room(self, problem: ResourceExhaustedError) -> None:
        """Sends the request that joined last back to the queue, or fails it if it is alone."""
        last = self._running[-1]
        if len(self._running) == 1:
            self._fail([last], problem)
            return
        self._waiting.appendleft(last)
        self._running.remove(last)
        self._room = len(self._running)
        self._read_anew([last, *(request for request in self._running if self._may_have_advanced(request))])

    def _may_have_advanced(self, request: Request) -> bool:
        """True of one that is to be read anew after an error: rows ran one by one, or its logits are lost."""
        runs_apart = self._forwards.score_apart if request.is_scoring else not self._forwards.are_unified
        return runs_apart or not (request.unread or request.is_scoring)

    def _read_anew(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.read_anew()
            self._left.append(request.cache_id)
        self._release_left()

    def _leave_if_done(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.is_done:
                self._leave(request)

    def _leave(self, request: Request) -> None:
        self._left.append(request.cache_id)
        self._running.remove(request)
        self._room = self._max_rows
        self._release_left()

    def _release_left(self) -> None:
        while self._left:
            try:
                self._release(self._left[0])  # an interrupt leaves it there for the next call
            except Exception:  # of a model that breaks the contract: said once
                self._left.popleft()
                raise
            self._left.popleft()

    def _release(self, cache_id: str) -> None:
        # A model that failed or was closed refuses this too; its reset frees everything.
        with contextlib.suppress(FerrumError):
            self.model.release(cache_id)
        if self.speculator is not None:
            self.speculator.forget(cache_id)

    def _fail(self, requests: Sequence[Request], problem: FerrumError) -> None:
        for request in list(requests):
            for one in (*request.copies, request):
                one.error = problem
            self._leave(request)
