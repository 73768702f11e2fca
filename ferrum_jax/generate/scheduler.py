"""Continuous batching: requests join and leave a running batch, prompts are prefilled in chunks beside decodes.

One thread uses a scheduler. If the model can, the scheduler begins a step before it reads the tokens of the last one: a
decode row takes its token on the device. A stop is then seen one step late, and the token chosen after it is dropped
with its sequence.
"""

import itertools
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ferrum_jax.contract.errors import FerrumError, ResourceExhaustedError
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor.batch import SampledToken, ScheduledRow, TargetScores, TokenChoice, WithCaptures
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.drafts import DraftSource
from ferrum_jax.generate.groups import fork_from_group, take_over
from ferrum_jax.generate.host_model import Backend, HostModel
from ferrum_jax.generate.request import Request, own_copy
from ferrum_jax.generate.rows import next_row, only_decodes, runs_of
from ferrum_jax.generate.shortage import Shortage
from ferrum_jax.generate.speculator import Speculator, is_refusal
from ferrum_jax.generate.updates import Update
from ferrum_jax.generate.waiting import WaitingLine

_log = logging.getLogger(__name__)
_PREEMPTED = (
    "preempted %s, whose %d positions are recomputed once one of %d other requests ends: %s; more kv_blocks or fewer "
    "max_seqs avoid it"
)


@dataclass(eq=False)
class _Step:
    """A batch that was begun and not read yet."""

    requests: list[Request]
    rows: list[ScheduledRow]
    pending: Any


class Scheduler:
    """Runs requests on any `DecoderOnlyLLM`; `step` advances all of them.

    When slots or blocks run short, the scheduler preempts a request: of those with the highest number as priority, the
    one that joined last. It loses its slot and blocks, waits, and is later recomputed from its tokens; its answer stays
    the same, except for rounding.
    """

    def __init__(self, model: DecoderOnlyLLM, *, max_rows: int, chunk_tokens: int, drafts: DraftSource | None = None):
        """Makes a scheduler whose steps have at most `max_rows` sequences and `chunk_tokens` prompt tokens.

        Raises:
            UnsupportedError, ConfigError: drafts and model do not go together, as `Speculator` says.
        """
        self.model = model
        self.backend: Backend = model if isinstance(model, ModelRunner) else HostModel(model)
        self.speculator = None if drafts is None else Speculator(model, self.backend, drafts)
        self._runs_ahead = self.backend.can_run_ahead and drafts is None and not model.loop_tokens
        self.max_rows = max_rows
        self._most_admitted = max_rows  # requests that run at a time; fewer after the KV ran short
        self._admitted_next = 0  # how many more may run once all of these get tokens
        self._shortage = Shortage(model)
        self._chunk_tokens = chunk_tokens
        self._waiting = WaitingLine()
        self._running: dict[Request, None] = {}  # in the order in which they joined
        self._in_flight: _Step | None = None
        self._updates: deque[Update] = deque()
        self._name = secrets.token_hex(4)
        self._numbers = itertools.count()

    def new_cache_id(self) -> str:
        """Returns an id that no other request has."""
        return f"generate-{self._name}-{next(self._numbers)}"

    @property
    def has_work(self) -> bool:
        """True while `step` has anything to do."""
        return bool(self._waiting or self._running or self._in_flight or self._updates)

    @property
    def num_running(self) -> int:
        """Requests that have a row; any thread may ask."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row, without copies whose shared prompt is not prefilled yet; any thread may ask."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queues a request."""
        if request.copies:
            for one in (request, *request.copies):
                one.group = request.cache_id
        self._waiting.add(request)

    def update(self, update: Update) -> None:
        """Queues an update of weights; `step` applies it after earlier ones, once its policy `live` allows."""
        self._updates.append(update)

    def abort(self, *requests: Request) -> None:
        """Drops requests and frees their slots and blocks; one that is done is no error. Their copies go on."""
        gone = set(requests)
        for one in (*self._running, *self._waiting):
            if one.copies:
                one.copies = [copy for copy in one.copies if copy not in gone]
        for request in requests:
            self._drop(request)

    def reset(self) -> None:
        """Resets the model; running requests are recomputed by the next step, so that their answers stay the same."""
        self._in_flight = None
        self.backend.reset()
        for request in self._running:
            request.restart()
        self._most_admitted, self._admitted_next = self.max_rows, 0
        self._shortage.clear()
        if self.speculator is not None:
            self.speculator.source.reset()

    def fail(self, problem: FerrumError) -> None:
        """Ends every running or waiting request, and every update, with an error.

        It raises if slots or blocks cannot be freed; requests and updates have ended then, too.
        """
        self._in_flight = None
        try:
            self._fail([*self._running, *self._waiting], problem)
        finally:
            self._running.clear()
            self._waiting = WaitingLine()
            while self._updates:
                if (done := self._updates.popleft().done).set_running_or_notify_cancel():
                    done.set_exception(own_copy(problem))

    def step(self) -> None:
        """Begins one step for as many requests as fit, and gives requests their tokens of the step before.

        If the model refuses the batch because of a request, the rows run one by one, and only requests whose own row is
        refused fail. Any other error of the model ends every running request.
        """
        self._set_weights()
        try:
            self._admit()
        except FerrumError as problem:  # the model failed
            self._fail([*self._running], problem)
        before = self._in_flight
        if self._running and not self._decode_many():
            requests, rows = [], []
            try:
                requests, rows = self._schedule()
            except FerrumError as problem:  # drafts or copies failed
                self._fail([*self._running], problem)
            if rows:
                try:
                    self._in_flight = self._count(requests, rows, self.backend.execute(rows))
                    self._admit_more()
                except ResourceExhaustedError as problem:
                    if before is None:  # else the step in flight may end requests: preempt only after that
                        self._make_room(problem)
                except FerrumError as problem:
                    if before is not None:
                        self._in_flight = None
                        self._collect(before)
                        before = None
                    self._handle(problem, requests, rows)
        if before is not None:
            if self._in_flight is before:  # nothing could be begun beside it
                self._in_flight = None
            self._collect(before)
        # The next token of a request that needs every token depends on the one in flight, so it is read now.
        needs_tokens = any(one.needs_every_token for one in self._running)
        if self._in_flight is not None and (needs_tokens or not self._runs_ahead):
            now, self._in_flight = self._in_flight, None
            self._collect(now)

    def _handle(self, problem: FerrumError, requests: list[Request], rows: list[ScheduledRow]) -> None:
        """Fails the requests that an error concerns: the only request of a batch, or all if the model is at fault.

        A request whose sequence was released from outside is recomputed, unless it got no token since the last time.
        """
        gone = self._resynchronise()
        if not is_refusal(problem):
            self._fail([*self._running], problem)
        elif len(requests) == 1 and not (requests[0] in gone and requests[0].has_progressed()):
            self._fail(requests, problem)
        else:
            self._run_singly(requests, rows)

    def _run_singly(self, requests: Sequence[Request], rows: Sequence[ScheduledRow]) -> None:
        for request, row in zip(requests, rows, strict=True):
            if request not in self._running or request.num_read != row.start or row.tokens is None:
                continue  # it ended, was preempted or restarted, or its token is only on the device
            try:
                self._collect(self._count([request], [row], self.backend.execute([row])))
            except ResourceExhaustedError as problem:
                self._make_room(problem)
            except FerrumError as problem:
                self._resynchronise()
                self._fail([request] if is_refusal(problem) else [*self._running], problem)

    def _count(self, requests: list[Request], rows: list[ScheduledRow], pending: Any) -> _Step:
        """Counts the positions that a begun batch fills and the tokens that it chooses."""
        for request, row, known in zip(requests, rows, pending.reused or [0] * len(rows), strict=True):
            if row.start < len(request.prompt):
                request.count_cached(row.start, row.num_tokens, known)
            if row.start == 0:
                request.kv_version = self.backend.params_version
            if isinstance(row.output, SampledToken):
                request.num_in_flight += 1
            if isinstance(row.output, TargetScores):  # `take_scores` counts its positions
                request.has_scores_in_flight = True
            else:
                request.num_read += 1 if row.tokens is None else len(row.tokens)
        return _Step(requests, rows, pending)

    def _collect(self, step: _Step) -> None:
        """Waits for a step and gives requests their tokens, scores and captures."""
        try:
            answers = step.pending.result()
        except FerrumError as problem:
            for request in step.requests:
                request.num_in_flight, request.has_scores_in_flight = 0, False
            self._resynchronise(failed=True)
            self._fail([*self._running], problem)
            return
        for request, row, answer in zip(step.requests, step.rows, answers, strict=True):
            if request.num_in_flight and isinstance(row.output, SampledToken):
                request.num_in_flight -= 1
            if request not in self._running:
                continue  # it ended with an earlier token, or was aborted
            if isinstance(answer, WithCaptures):
                request.take_captured(answer.points)
                answer = answer.answer
            if isinstance(answer, TokenChoice):
                request.append(answer, self.backend.params_version)
            elif isinstance(row.output, TargetScores):
                request.take_scores(answer)
            self._settle(request)

    def _settle(self, request: Request) -> None:
        """Frees a request that is done, and tells its caller that there is something new."""
        if request.error is not None:
            return self._fail([request], request.error)  # its copies, too
        if request.is_done and not self._hand_over(request):
            self._leave(request)
        request.tell()

    def _schedule(self) -> tuple[list[Request], list[ScheduledRow]]:
        """Chooses each request's share of the next step; prompts share `chunk_tokens` by priority, then by age."""
        for request in [one for one in self._running if one.copies]:
            self._fork(request)
        ahead: Sequence[Request] = ()
        if self.speculator is not None and self._in_flight is None:
            ahead = self.speculator.advance([one for one in self._running if not one.copies and not one.is_scoring])
            for request in ahead:
                self._settle(request)
        budget = self._chunk_tokens
        requests: list[Request] = []
        rows: list[ScheduledRow] = []
        for request in sorted(self._running, key=attrgetter("priority")):
            if request in ahead:
                continue
            row = next_row(request, budget)
            if row is None:
                continue
            if request.num_read == 0 and not self._bind(request):
                continue
            if row.tokens is not None and (len(row.tokens) > 1 or isinstance(row.output, TargetScores)):
                budget -= len(row.tokens)
            requests.append(request)
            rows.append(row)
        return requests, rows

    def _bind(self, request: Request) -> bool:
        """Binds adapter and interventions to the sequence of a request before its first row; False if it cannot run."""
        asked = request.interventions
        try:
            if request.adapter is not None:
                self.model.set_lora_adapter_for_cache(request.cache_id, request.adapter)
            if asked is not None and isinstance(self.model, ModelRunner):
                self.model.set_interventions(request.cache_id, asked.edits, start=asked.start, stop=asked.stop)
        except FerrumError as problem:
            may_wait = isinstance(problem, ResourceExhaustedError)  # every adapter row is in use: others run
            if not may_wait or not any(one.num_read or one.is_bound for one in self._running):
                self._fail([request], problem)
            return False
        request.is_bound = True
        return True

    def _fork(self, request: Request) -> None:
        """Queues a request's copies once its shared prompt is prefilled, and admits those for which there is room."""
        if not request.can_share(request.fork_position):
            return
        copies, request.copies = request.copies, []
        if request.num_read == 0:  # there is nothing to share
            for copy in copies:
                copy.group = ""
        self._waiting.put_first(*copies)
        self._admit()

    def _hand_over(self, request: Request) -> bool:
        """Passes the sequence of a request that is done to the next one of its group; returns whether it did."""
        if not request.group:
            return False
        heir = next((one for one in self._waiting if one.group == request.group), None)
        if heir is None or self._is_held(heir):
            return False
        first = self._waiting[0]
        if first.preemptions or first.priority < heir.priority:
            return False
        former = request.cache_id
        if not take_over(heir, request, self.backend):
            return False
        if self.speculator is not None:
            self.speculator.forget(former)
        del self._running[request]
        self._waiting.remove(heir)
        self._running[heir] = None
        return True

    def _set_weights(self) -> None:
        """Applies the queued updates in order, up to the first that must wait; reads the step in flight first."""
        while self._updates:
            update = self._updates[0]
            if update.live == "wait" and self._begun(update) and not update.done.cancelled():
                return
            if self._in_flight is not None:
                step, self._in_flight = self._in_flight, None
                self._collect(step)
            self._updates.popleft()  # not before: `fail` would not know it
            if update.apply([one.cache_id for one in self._running]):
                try:
                    for request in self._begun(update):
                        self._renew(request, update)
                finally:
                    update.done.set_result(self.backend.params_version)
            del update  # its error knows this frame, and would keep itself and the refused weights alive

    def _begun(self, update: Update) -> list[Request]:
        """Requests whose weights change: running ones, and waiting ones that have tokens or scores."""
        waiting = [one for one in self._waiting if one.has_sampled_here or one.scores]
        return [one for one in (*self._running, *waiting) if update.concerns(one)]

    def _renew(self, request: Request, update: Update) -> None:
        """Applies the policy `live` of an update to a request."""
        if update.live == "abort":
            request.interrupt()
            self._drop(request)
            request.tell()
        elif request in self._running and (update.live == "recompute" or not request.has_sampled_here):
            self._release(request.cache_id)
            request.restart()

    def _drop(self, request: Request) -> None:
        """Drops a request and frees what it holds; the first of its copies leads the others."""
        copies, request.copies = request.copies, []
        if copies and (request in self._running or request in self._waiting):
            copies[0].copies = copies[1:]
            self._waiting.put_first(copies[0])
        if request in self._running:
            self._leave(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def _is_held(self, request: Request) -> bool:
        return any(update.holds_back(request) for update in self._updates)

    def _decode_many(self) -> bool:
        """Decodes many tokens of each request in one call, if the model can and all requests only decode."""
        most = self.model.loop_tokens
        if not most or self._in_flight is not None or self.speculator is not None:
            return False
        if not all(only_decodes(request, self.model) for request in self._running):
            return False
        runs = runs_of(self._running, most)
        requests = list(self._running)
        try:
            found = self.model.decode_n(runs, until_one_ends=bool(self._waiting))
        except FerrumError as problem:
            self._resynchronise()
            if is_refusal(problem) or isinstance(problem, ResourceExhaustedError):
                return False  # token by token: blocks for so many tokens are short, or one request asks too much
            self._fail([*self._running], problem)
            return True
        for request, run in zip(requests, found, strict=True):
            processed = run.logprobs if run.processed_logprobs is None else run.processed_logprobs
            for choice in map(TokenChoice, run.token_ids, run.logprobs, processed):
                request.num_read += 1
                request.append(choice, self.backend.params_version)
                if request.is_done:  # perhaps by a stop text: later tokens are dropped with the sequence
                    break
            request.forget_settings()  # the program used settings of its own, not the slot's
            self._settle(request)
        return True

    def _admit(self) -> None:
        self._shortage.reopen(self._running)
        while self._waiting and len(self._running) < self._most_admitted:
            request = next((one for one in self._waiting if not self._is_held(one)), None)
            if request is None or not self._shortage.leaves_room(request, self._running):
                return
            self._waiting.remove(request)
            self._running[request] = None
            fork_from_group(request, (one for one in self._running if not self._shortage.is_at(one)), self.backend)

    def _admit_more(self) -> None:
        """Lets more requests run once all that may do, and get tokens: a refused batch may cost them their KV."""
        if not self._most_admitted <= len(self._running) < self.max_rows:
            return
        if not any(one.unread or one.num_unscored for one in self._running):
            self._most_admitted = min(self.max_rows, self._most_admitted + self._admitted_next)
            self._admitted_next *= 2

    def _make_room(self, problem: ResourceExhaustedError) -> None:
        """Preempts the request that joined last among the least urgent ones; fails it if it is the only one.

        If it holds no positions yet, it goes back to the queue with half of the requests that hold none, and is not
        counted as preempted.
        """
        rivals = [one for one in self._running if self._shortage.competes(one, problem)] or [*self._running]
        last = max(reversed(rivals), key=attrgetter("priority"))
        if len(rivals) == 1:
            self._resynchronise()
            self._fail([last], problem)
            return
        leaving = [last]
        if not last.num_read:
            fresh = [one for one in rivals if not one.num_read and one.priority == last.priority]
            leaving = fresh[len(fresh) // 2 :]
        self._running = {one: None for one in self._running if one not in leaving}
        self._waiting.put_first(*leaving)
        if problem.replica is None:
            self._most_admitted, self._admitted_next = len(self._running), len(leaving) // 2
        else:
            self._shortage.add(problem.replica)
        if last.num_read:
            level = logging.DEBUG if last.preemptions else logging.INFO
            _log.log(level, _PREEMPTED, last.cache_id, last.num_read, len(self._running), problem)
            last.preemptions += 1
        for one in leaving:
            self._release(one.cache_id)
            one.restart()
        self._resynchronise()

    def _resynchronise(self, *, failed: bool = False) -> set[Request]:
        """Restarts requests whose `num_read` differs from the model's length; returns those it has no positions of."""
        gone: set[Request] = set()
        for request in list(self._running):
            try:
                length = -1 if failed else self.backend.kv_len(request.cache_id) or 0
            except FerrumError:  # the model has failed; its reset drops everything
                length = -1
            if length != request.num_read:
                if length == 0:
                    gone.add(request)
                self._release(request.cache_id)
                request.restart()
        return gone

    def _leave(self, request: Request) -> None:
        self._shortage.ends(request)
        self._release(request.cache_id)
        del self._running[request]
        # Its place may be taken, and one more is tried; if that goes well, two more, then four, and so on.
        self._most_admitted = min(self.max_rows, max(self._most_admitted, len(self._running) + 2))
        self._admitted_next = 2

    def _release(self, cache_id: str) -> None:
        try:
            self.backend.release(cache_id)
        except FerrumError:  # a failed or closed model refuses this, too; its reset frees everything
            pass
        except Exception as problem:  # noqa: BLE001  the model breaks the contract: other requests go on
            _log.warning("%s cannot release %r: %r", type(self.model).__name__, cache_id, problem)
        if self.speculator is not None:
            self.speculator.forget(cache_id)

    def _fail(self, requests: Sequence[Request], problem: FerrumError) -> None:
        """Ends requests and their copies, each with its own copy of an error, even if freeing their KV raises."""
        ended = [one for request in requests for one in (*request.copies, request)]
        try:
            for request in requests:
                request.copies = []
                self._drop(request)
        finally:
            for one in ended:
                if not one.is_done:
                    one.error = problem if len(ended) == 1 else own_copy(problem)
            for one in ended:
                one.tell()
