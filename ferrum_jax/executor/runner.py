"""`ModelRunner`: the `DecoderOnlyLLM` contract over one pipeline of compiled steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.artifacts import Artifacts
from ferrum_jax.compile.program_cache import ProgramCache
from ferrum_jax.config import ModelConfig
from ferrum_jax.config.engine import CompilerOptions
from ferrum_jax.contract.answers import Captured, TokenScores
from ferrum_jax.contract.checks import check_cache_id, check_count, check_flag, check_int
from ferrum_jax.contract.decoding import DecodedRun, DecodeRun, LogitsReturnPolicy
from ferrum_jax.contract.errors import ModelError, RequestValidationError, ResourceExhaustedError
from ferrum_jax.contract.execution import ExecutorState
from ferrum_jax.contract.llm import DecodeRow, Logits, ScoreRow, UnifiedRow, VerifyRow
from ferrum_jax.contract.slots import KvSlotRequest, KvSlotReservation
from ferrum_jax.executor import multi_step, reservations
from ferrum_jax.executor import rows as check
from ferrum_jax.executor.adaptable import Adaptable
from ferrum_jax.executor.adapters import Adapters, KeptSequences
from ferrum_jax.executor.batch import (
    ALL_LOGITS,
    LAST_LOGITS,
    NOT_FINITE,
    ScheduledBatch,
    TokenChoice,
)
from ferrum_jax.executor.counters import DecodeBatchCounters
from ferrum_jax.executor.device import DeviceState, KvMemory
from ferrum_jax.executor.following import follow
from ferrum_jax.executor.hosts import Hosts
from ferrum_jax.executor.interventions import BoundInterventions
from ferrum_jax.executor.lifecycle import Lifecycle
from ferrum_jax.executor.pipeline import PendingStep, Pipeline
from ferrum_jax.executor.sizing import EnginePlan
from ferrum_jax.models.hooks import check_points, hidden_points, state_number
from ferrum_jax.models.placement import ModelPlacement
from ferrum_jax.models.specs import NewParams, ParamTree
from ferrum_jax.ops.quantised import activation_dtype
from ferrum_jax.progress import track
from ferrum_jax.sharding.devices import JaxDevice
from ferrum_jax.sharding.mesh import outside_meshes


class ModelRunner(Adaptable):
    """Live sequences of one model, on one device or divided over the devices of a mesh.

    Calls from several threads are serialised. A call that is refused changes nothing. A device failure inside a step,
    or an interrupt, leaves the state Error, in which every call raises until `reset`.
    """

    def __init__(
        self,
        params: ParamTree,
        model_config: ModelConfig,
        plan: EnginePlan,
        *,
        device: JaxDevice | None = None,
        placed: ModelPlacement | None = None,
        specs: ParamTree | None = None,
        strict: bool = False,
        name: str = "",
        artifacts: Artifacts | None = None,
        memory: KvMemory | None = None,
        compiler_options: CompilerOptions = None,
        hosts: Hosts | None = None,
    ):
        """Allocates the KV unless `memory` has one; `specs`, for a mesh, are undivided. Other processes `follow` 0."""
        hosts, self.params_version = hosts or Hosts(), 0  # how often new parameters or adapters were set
        self.placed = placed or ModelPlacement.on_one(device)
        self.model_config, self.plan = model_config, plan
        self.device, self.artifacts = self.placed.placement.first, artifacts
        self.name = name or model_config.model_type
        how: dict[str, Any] = {"strict": strict, "artifacts": artifacts, "options": compiler_options}
        programs = ProgramCache(lambda key: key.lower(self._device.context()), together=hosts.together, **how)
        adapters = Adapters(model_config, plan.loras, activation_dtype(params).name, self.placed, programs, hosts)
        memory = memory or KvMemory(plan.cache, self.placed.placement, artifacts, compiler_options)
        self._device = DeviceState(params, model_config, memory, plan.sampler, self.placed, programs, adapters, specs)
        follow(self._device, hosts)
        self._life = Lifecycle("runner", lambda: self._device.is_lost)
        bound = BoundInterventions(model_config, plan.max_seqs, self.placed, hosts.are_several)
        self._pipeline = Pipeline(self._device, programs, plan, adapters, bound, self._life)
        self._programs, self._adapters = programs, adapters
        self._decode_batches, self._vocab_size = DecodeBatchCounters(), model_config.vocab_size

    def __enter__(self) -> "ModelRunner":
        self._life.check_not_closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> ExecutorState:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Ready, Error or Shutdown; Initializing while the KV is freed."""
        state = self._life.state
        return ExecutorState.Initializing if state is ExecutorState.Ready and self._life.paused else state

    @property
    @outside_meshes()
    def params(self) -> ParamTree:
        """The parameters in their layout, as joined copies where a mesh divides them; raises after `close`."""
        self._life.check_not_closed()
        return self._device.undivided_params()

    can_run_ahead, num_replicas = True, 1  # rows may take tokens that the host has not read; see executor/replicas.py

    def execute(self, batch: ScheduledBatch) -> PendingStep:
        """Begins a batch of rows, each with the output it wants; the device works while the caller goes on.

        `PendingStep.result` waits for the answers. A row may take the token that was sampled last for its sequence
        before the host has read it (`tokens=None`).

        Raises:
            RequestValidationError: a row is no `ScheduledRow`, its tokens are not int32 `[n]` of the vocabulary, its
                output is unknown or does not fit its tokens, it does not start where its sequence ends, or an id
                occurs twice.
            ResourceExhaustedError: slots or blocks are short.
        """
        with self._life.lock, self._life:
            return self._pipeline.plan_batch(check.check_batch(batch, self._vocab_size))()

    def prefill(self, cache_id: str, tokens: Sequence[int]) -> Logits:
        """Appends `tokens` (creating the sequence if it is unknown); returns the last one's logits, `[vocab]`."""
        with self._life.lock, self._life:
            return self._pipeline.execute([check.appended_row(cache_id, tokens, LAST_LOGITS, *self._known)]).result()[0]

    def decode(self, cache_id: str, token: int, pos: int) -> Logits:
        """Appends one token at position `pos`, which must be the cache's length; returns `[vocab]`."""
        with self._life.lock, self._life:
            return self._pipeline.execute(check.decode_rows([(cache_id, token, pos)], None, *self._known)).result()[0]

    def decode_batch(self, batch: Sequence[DecodeRow]) -> list[Logits]:
        """Decodes one token of each sequence in one forward, answers in the same order."""
        return self.decode_batch_with_full_logits(batch, False)

    def decode_batch_with_full_logits(self, batch: Sequence[DecodeRow], force_full_logits: bool) -> list[Logits]:
        """As `decode_batch`, which always computes all logits; the flag is counted."""
        with self._life.lock, self._life:
            forced = check_flag("force_full_logits", force_full_logits)
            logits = self._pipeline.execute(check.decode_rows(batch, None, *self._known)).result()
            self._count_decodes(len(logits), forced=forced)
            return logits

    def decode_batch_with_logits_policy(
        self, batch: Sequence[DecodeRow], policies: Sequence[LogitsReturnPolicy]
    ) -> list[Logits | int]:
        """As `decode_batch`; for greedy rows, only the token id is copied to the host.

        Raises:
            ModelError: the logits of a greedy row are not finite; `truncate_kv` takes the batch's tokens back.
        """
        with self._life.lock, self._life:
            check_count("policies", policies)
            answers = self._answers(check.decode_rows(batch, policies, *self._known))
            self._count_decodes(len(answers))
            return answers

    def forward_verify(self, cache_id: str, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends `tokens` and returns `[n, vocab]`: row i is the distribution after token i."""
        with self._life.lock, self._life:
            return self._pipeline.execute([check.appended_row(cache_id, tokens, ALL_LOGITS, *self._known)]).result()[0]

    def forward_verify_batch(self, rows: Sequence[VerifyRow]) -> list[NDArray[np.float32]]:
        """As `forward_verify` for several sequences, as many in one step as `verify_blocks` allow."""
        with self._life.lock, self._life:
            batch = check.verify_rows(rows, *self._known)
            return self._pipeline.execute(batch).result()

    def score_batch(self, rows: Sequence[ScoreRow]) -> list[TokenScores]:
        """Appends tokens of several sequences; returns log-probabilities of the targets after them, and greedy ids.

        Known prefixes are not reused.
        """
        with self._life.lock, self._life:
            batch = check.score_rows(rows, *self._known)
            found = self._pipeline.execute(batch).result()
            return [TokenScores(logprobs=one.logprobs, greedy_ids=one.greedy_ids) for one in found]

    def capture(
        self,
        cache_id: str,
        tokens: Sequence[int],
        *,
        hidden: Sequence[int] = (),
        attention_weights: Sequence[int] = (),
        points: Sequence[Any] = (),
    ) -> Captured:
        """Appends `tokens`; returns the logits and the captured arrays of each; `points` are those of models/hooks.py.

        A step for a new set of points is compiled when it is first needed.
        """
        with self._life.lock, self._life:
            cfg = self.model_config
            asked, (states, weights) = check_points(points, cfg), hidden_points(hidden, attention_weights, cfg)
            row = check.appended_row(cache_id, tokens, ALL_LOGITS, *self._known)
            row = row._replace(capture=tuple(sorted({*asked, *states, *weights})))
            found = self._pipeline.execute([row]).result()[0]
            if not row.capture:
                return Captured(logits=found)
            return Captured(
                logits=found.answer,
                hidden={state_number(point): found.points[point] for point in states},
                attention_weights={point.layer: found.points[point] for point in weights if point.layer is not None},
                points={point: found.points[point] for point in asked},
            )

    def set_interventions(
        self, cache_id: str, interventions: Mapping[Any, Any] | None, *, start: int = 0, stop: int | None = None
    ) -> None:
        """Binds interventions to one sequence, for all calls until its release; None unbinds them.

        Args:
            cache_id: a sequence without tokens yet.
            interventions: an `Edit` by hook point (models/hooks.py), whose arrays broadcast to one token's, `[D]` in
                the residual stream, `[N, H]` at `z`. In a batch, other rows are not changed. New values compile
                nothing; a step for a new set of points is compiled when it is first needed.
            start: the first position whose token is changed.
            stop: one past the last; None has no end.

        Raises:
            RequestValidationError: the sequence has tokens, or an edit does not fit.
            InvalidParameterError: a point is unknown.
            UnsupportedError: a function, attention scores or weights, or a model that several processes run; on a mesh
                that divides the model, points outside the residual stream.
            ResourceExhaustedError: `max_seqs` sequences have interventions.
        """
        with self._life.lock, self._life:
            key = check_cache_id(cache_id)
            if length := self._pipeline.table.length(key):
                raise RequestValidationError(f"{key!r} has {length} tokens, which were computed without: release it")
            self._pipeline.interventions.bind(key, interventions, start, stop)

    def unified_forward(self, items: Sequence[UnifiedRow]) -> list[Logits | None]:
        """Runs decode rows and chunks of prompts in one forward; None exactly where a chunk is not final."""
        with self._life.lock, self._life:
            return self._pipeline.execute(check.unified_rows(items, None, *self._known)).result()

    def unified_forward_with_logits_policy(
        self, items: Sequence[UnifiedRow], policies: Sequence[LogitsReturnPolicy]
    ) -> list[Logits | int | None]:
        """As `unified_forward`; greedy rows as in `decode_batch_with_logits_policy`."""
        with self._life.lock, self._life:
            check_count("policies", policies)
            return self._answers(check.unified_rows(items, policies, *self._known))

    def _answers(self, rows: ScheduledBatch) -> list[Any]:
        """Runs rows; returns their logits, or token ids of rows that sample."""
        answers = self._pipeline.execute(rows).result()
        for row, one in zip(rows, answers, strict=True):
            if isinstance(one, TokenChoice) and math.isnan(one.logprob):
                raise ModelError(f"{row.cache_id!r}: {NOT_FINITE}")
        return [one.token_id if isinstance(one, TokenChoice) else one for one in answers]

    def decode_n(self, runs: Sequence[DecodeRun], *, until_one_ends: bool = False) -> list[DecodedRun]:
        """Decodes up to `max_tokens` tokens of each sequence, chosen on the device, `multi_step_tokens` a device call.

        The tokens are those that `decode` and `ops.sampling.sample` would give one by one. The KV of all tokens is
        allocated first, so that a call that runs short of blocks changes nothing.
        """
        with self._life.lock, self._life:
            until_one_ends = check_flag("until_one_ends", until_one_ends)
            return multi_step.plan(self._pipeline, runs, until_one_ends=until_one_ends)()

    @property
    def loop_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens that one device call of `decode_n` chooses for each row; 0 where there are no such programs."""
        return self.plan.buckets.multi_step_tokens

    def unified_forward_can_return_full_logits(self) -> bool:
        """Returns True."""
        with self._life.lock, self._life:
            return True

    def release(self, cache_id: str) -> None:
        """Frees the sequence's slot and blocks; an unknown id is no error."""
        with self._life.lock, self._life:
            key = check_cache_id(cache_id)
            with self._device.changing():
                self._pipeline.table.release(key)
                self._adapters.bind(key, None)
                self._pipeline.interventions.bind(key, None, 0, None)

    def truncate_kv(self, cache_id: str, new_len: int) -> None:
        """Rolls the sequence back to `new_len` positions; past its end, or an unknown id, is no error."""
        with self._life.lock, self._life:
            key, length = check_cache_id(cache_id), check_int("new_len", new_len, 0)
            holder = self._holder(key)
            holder._pipeline.settle()
            with holder._device.changing():
                holder._pipeline.table.truncate(key, length)

    def fork(self, cache_id: str, new_cache_id: str) -> None:
        """Makes `new_cache_id` a copy of a live sequence; the block that both go on in is copied when one writes it.

        Raises:
            RequestValidationError: `cache_id` is unknown, or `new_cache_id` is live, or bound to something else.
            ResourceExhaustedError: no slot is free.
        """
        with self._life.lock, self._life:
            old, new = check_cache_id(cache_id), check_cache_id(new_cache_id)
            adapters = self._adapters
            if adapters.of(new) not in (None, adapters.of(old)):
                raise RequestValidationError(f"{new!r} is bound to another adapter than {old!r}")
            self._pipeline.interventions.check_copy(old, new)
            self._pipeline.settle()
            with self._device.changing():
                self._pipeline.table.fork(old, new)
                adapters.bind(new, adapters.of(old))
                self._pipeline.interventions.copy(old, new)

    def reset(self) -> None:
        """Drops every sequence and prefix; keeps weights and compiled steps. It also ends the state Error.

        Raises:
            ResourceExhaustedError: a lost KV cannot be allocated again; the state stays Error.
        """
        with self._life.lock:
            self._life.check_not_closed()
            if self._device.is_lost:
                self._device.reallocate()
            self._pipeline.clear()
            self._life.state, self._life.paused = ExecutorState.Ready, ""

    def prepare(self, cache_id: str, max_tokens: int) -> None:
        """Takes a slot, and compiles the programs that a prompt of at most `max_tokens` tokens and decoding need."""
        with self._life.lock, self._life:
            key, count = check_cache_id(cache_id), check_int("max_tokens", max_tokens, 1)
            reservations.prepare(self._pipeline, key, count)

    def prepare_kv_capacity(self, cache_id: str, capacity_hint: int) -> None:
        """Raises if a sequence of `capacity_hint` positions could never be served."""
        with self._life.lock, self._life:
            hint, key = check_int("capacity_hint", capacity_hint, 0), check_cache_id(cache_id)
            self._holder(key)._pipeline.table.check_capacity(key, hint)

    def reserve_kv_slots(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        """Makes `target_len` positions of each id writable, all or nothing.

        An id that is unknown gets a slot if it asks for at least one position. A block that is shared is copied now.

        Raises:
            RequestValidationError: a target is past the capacity.
            ResourceExhaustedError: slots or blocks are short, for the targets or for the admission targets.
        """
        with self._life.lock, self._life:
            return reservations.plan(self._pipeline, requests)()

    def warmup(
        self,
        *,
        progress: bool = True,
        load: bool = False,
        distributions: bool = False,
        drafts: bool = False,
        masks: bool = False,
        scores: bool = False,
    ) -> None:
        """Compiles every declared program, or finds it whole on disk.

        A program on disk is loaded when it is first used, even if it was compiled here; `load` loads all of them now.
        `distributions`: also those for the output `Distributions`, which drafts with probabilities of their own need.
        `drafts`: also those that verify drafted tokens, which `spec_tokens` in the settings imply.
        `masks`: also those for structured output. `scores`: also those for scores under sampler settings.
        """
        with self._life.lock, self._life:
            bar = track("compiling steps") if progress else None
            more = self.plan.buckets.distributions() if distributions else []
            drafts = drafts or bool(self.plan.spec_tokens)
            more += self.plan.buckets.masks(drafts=drafts) if masks else []
            more += self.plan.buckets.processed_scores() if scores else []
            for one in self._pipelines:
                one.programs.warmup([*self.plan.declared(drafts=drafts), *more], bar, load=load)

    @outside_meshes()
    def set_params(self, params: NewParams, *, keep_sequences: KeptSequences = False) -> None:
        """Serves new weights, which must have the tree, shapes and dtypes of the served ones, or be in another layout.

        Arrays that lie where the served ones do are used without a copy; others, such as a trainer's on its own mesh,
        are moved from device to device. Weights of another layout (models/layout.py) are copied into the served one, by
        a program that the first such call compiles; on a mesh that divides the model they are refused. No step is
        compiled. Every known prefix is forgotten, and `params_version` goes up by one. It may be called while the KV is
        freed, or after a trainer's function took the served weights as donated arguments; from that donation on, every
        step is a RequestValidationError until this call.

        Args:
            params: the weights; or a function that computes the new weights from the served ones. It is called between
                two steps and may donate them to a jitted function, which then needs no memory for a second copy on one
                device. If it fails after that, or its result is refused, every step is a RequestValidationError until
                weights are set. It must not change this runner.
            keep_sequences: which sequences may be live: True for all, or their ids. They go on under the new weights
                with the keys and values of the old ones, which never become another sequence's prefix. The call waits
                for steps in flight.

        Raises:
            RequestValidationError: another sequence is live, whose keys and values are of the old weights.
            InvalidParameterError: the weights differ in more than their values; the message lists where.
            ResourceExhaustedError: there is no memory for the copy of weights of another layout.
            UnsupportedError: a function is given, but several processes share the weights.
        """
        with self._life.lock:
            self._life.check_not_closed()
            self._life.check_not_failed()
            for one in self._pipelines:
                one.check_live("new weights are set", keep_sequences)
            if callable(params):
                self._pipelines[0].device.check_params_live()
                params = params(jax.tree.map(lambda leaf: leaf, self.params))  # a tree of its own
            checked = dict(zip(self._pipelines, self._checked_params(params), strict=True))
            if any(one.table.live for one in self._pipelines):
                with self._life:
                    for one in self._pipelines:
                        one.settle()
            for one in self._pipelines:
                one.table.invalidate_prefixes()
            self.params_version += 1  # before the weights change: an interrupt must leave a new version
            self._on_all(lambda one: one.device.set_params(checked[one]))

    def _checked_params(self, params: ParamTree) -> list[ParamTree]:
        """Returns new parameters for each replica, on its devices."""
        return [self._device.check_params(params)]

    def reset_prefix_cache(self) -> None:
        """Forgets every known prefix; live sequences go on, and their blocks become nobody's prefix."""
        with self._life.lock, self._life:
            for one in self._pipelines:
                one.settle()
                one.table.forget_prefixes()

    def free_kv(self) -> None:
        """Frees the KV's memory until `allocate_kv` or `reset`; until then, only `set_params` and `close` are served.

        Raises:
            RequestValidationError: a sequence is live.
        """
        with self._life.lock, self._life:
            for one in self._pipelines:
                one.check_live("the KV is freed")
            for one in self._pipelines:
                one.reset_table()
                one.device.free()
            self._life.paused = "the KV is freed: allocate_kv() first"

    def allocate_kv(self) -> None:
        """Allocates the KV again after `free_kv`, empty and of the same size; compiles nothing.

        Raises:
            ResourceExhaustedError: the device has too little memory left; the KV stays freed.
        """
        with self._life.lock:
            self._life.check_not_closed()
            self._life.check_not_failed()
            if self._life.paused:
                try:
                    for one in self._pipelines:
                        one.device.reallocate()
                except ResourceExhaustedError:
                    for one in self._pipelines:
                        one.device.free()
                    raise
                self._life.paused = ""

    def compile_stats(self) -> dict[str, Any]:
        """Counts programs: compiled, loaded (of which on_disk not yet used), seconds, compiles_after_warmup, steps."""
        with self._life.lock, self._life:
            return self._programs.stats()

    def close(self) -> None:
        """Frees the KV, parameters and programs; closing twice is no error, a later call is a CancelledError."""
        with self._life.lock:
            self._life.state = ExecutorState.Shutdown
            if not self._life.is_forked:  # there the arrays' threads are missing
                self._device.drop()
                self._programs.drop()

    @property
    def _known(self) -> tuple[int, check.Length]:
        """What checks of rows need: the size of the vocabulary, and a function for a sequence's length."""
        return self._vocab_size, self._pipeline.table.length

    def _count_decodes(self, num_rows: int, *, forced: bool = False) -> None:
        if num_rows:
            unpadded = num_rows in self.plan.buckets.decode_rows
            self._decode_batches.count(num_rows, forced=forced, unpadded=unpadded)
