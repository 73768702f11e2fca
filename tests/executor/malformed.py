"""Calls of every public method with arguments that are right here and junk there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ferrum_jax import LlmExecutor
from ferrum_jax.contract import (
    ActiveLoraAdapter,
    DecodeInput,
    DecodeRun,
    FullLogits,
    GreedyArgmax,
    GreedyRepetitionPenalty,
    KvSlotRequest,
    PrefillInput,
    Sampling,
    TokenSelectionMask,
    UnifiedBatch,
    UnifiedBatchItem,
)
from ferrum_jax.executor import ModelRunner
from tests.executor.junk import JUNK, V, fields, maybe


@dataclass
class Scene:
    """A runner with the live sequence `a` of 3 tokens, and an executor on it."""

    runner: ModelRunner
    executor: LlmExecutor
    handles: Mapping[str, Any]  # live, stale, released, foreign
    folder: str  # of an adapter


Call = Callable[[Scene], Any]
HELD = 3  # tokens of every live sequence


@dataclass(frozen=True)
class Later:
    """A handle, or a path, that only the scene knows."""

    name: str


@dataclass(frozen=True)
class Built:
    """A dataclass of the contract, to be built when the call is made."""

    kind: type
    given: Mapping[str, Any]


def resolve(value: Any, scene: Scene) -> Any:
    """Builds what was left for later, also inside of tuples and lists of it."""
    if isinstance(value, Later):
        return scene.folder if value.name == "folder" else scene.handles[value.name]
    if isinstance(value, Built):
        return value.kind(**{name: resolve(one, scene) for name, one in value.given.items()})
    if isinstance(value, Together):
        return [resolve(one, scene) for one in value.items]
    if type(value) is dict:
        return {key: resolve(one, scene) for key, one in value.items()}
    return value


@dataclass(frozen=True)
class Together:
    """A list of what is left for later."""

    items: list[Any]


def built(kind: type, **right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return fields(**right).map(lambda given: Built(kind, given))


def several(one: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return maybe(st.lists(maybe(one), max_size=3).map(Together))


HANDLE = st.sampled_from(["live", "live", "live", "stale", "released", "foreign"]).map(Later)
ID = st.sampled_from(["a", "a", "b", "c", "llm-cache-99"])
TOKEN = st.integers(0, V - 1)
TOKENS = st.lists(maybe(TOKEN), min_size=1, max_size=5)
LENGTH = st.integers(0, 12)
BOOL = st.booleans()
ROW = st.lists(TOKEN, min_size=1, max_size=4)
ARRAY = st.one_of(ROW.map(lambda row: np.array([row])), ROW.map(lambda row: [row]), st.just([[1]]))
ONE = st.one_of(TOKEN.map(lambda one: np.array([[one]])), TOKEN.map(lambda one: [[one]]))
MASK = built(
    TokenSelectionMask,
    fingerprint=st.text(max_size=2),
    valid_token_mask=st.one_of(
        st.lists(maybe(st.integers(0, 1)), max_size=V + 2),
        st.lists(st.floats(), max_size=4).map(np.array),
        st.just(np.ones(V, np.int8)),
    ),
)
PENALTY = built(GreedyRepetitionPenalty, penalty=st.floats(0.1, 3), token_ids=TOKENS)
POLICY = st.one_of(
    st.just(FullLogits()), st.just(GreedyArgmax()), built(GreedyArgmax, token_mask=MASK, repetition_penalty=PENALTY)
)
ADAPTER = built(ActiveLoraAdapter, name=st.sampled_from(["one", "two"]), path=st.just(Later("folder")))
REQUEST = built(KvSlotRequest, cache_id=ID, target_len=LENGTH, admission_target_len=st.one_of(st.none(), LENGTH))
METADATA = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {},
        optional={
            "ferrum_lora_adapter": maybe(st.just("one")),
            "ferrum_lora_path": maybe(st.just(Later("folder"))),
            "ferrum_require_full_logits": maybe(BOOL),
            "ferrum_kv_capacity_hint": maybe(LENGTH),
            "ferrum_kv_admission_target_len": maybe(LENGTH),
            "ferrum_other": JUNK,
            "mine": JUNK,
        },
    ),
)
PREFILL = built(
    PrefillInput,
    input_ids=ARRAY,
    attention_mask=st.one_of(st.none(), ARRAY.map(np.ones_like)),
    position_ids=st.one_of(st.none(), ARRAY),
    kv_cache=st.one_of(st.none(), HANDLE),
    metadata=METADATA,
)
DECODE = built(
    DecodeInput,
    input_ids=ONE,
    kv_cache=HANDLE,
    position_ids=st.sampled_from([None, None, [[HELD]], [[9]]]),
    metadata=METADATA,
    logits_policy=POLICY,
)
ITEM = built(
    UnifiedBatchItem,
    seq_id=ID,
    q_tokens=TOKENS,
    pos_offset=st.sampled_from([0, HELD, 9]),
    is_final_chunk=BOOL,
    kv_cache=st.one_of(st.none(), HANDLE),
    metadata=METADATA,
    logits_policy=POLICY,
)


def _rows(*columns: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return maybe(st.lists(maybe(st.tuples(*map(maybe, columns))), max_size=3))


PLACE = st.sampled_from([0, HELD, HELD, 9])
DECODES, UNIFIED = _rows(ID, TOKEN, PLACE), _rows(ID, TOKENS, PLACE, BOOL)
POLICIES = several(POLICY)
SAMPLING = built(
    Sampling,
    temperature=st.floats(0, 2),
    top_k=LENGTH,
    top_p=st.floats(0.1, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
)
RUN = built(
    DecodeRun,
    cache_id=ID,
    token=TOKEN,
    pos=st.sampled_from([HELD, HELD, HELD, 0, 9]),
    max_tokens=st.integers(1, 5),
    stop_ids=st.lists(st.integers(0, 2**40), max_size=18),
    sampling=SAMPLING,
    seed=st.integers(0, 2**33),
)
RUNNER_CALLS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "prefill": (ID, TOKENS),
    "decode": (ID, TOKEN, PLACE),
    "decode_batch": (DECODES,),
    "decode_batch_with_full_logits": (DECODES, BOOL),
    "decode_batch_with_logits_policy": (DECODES, POLICIES),
    "decode_n": (several(RUN),),
    "forward_verify": (ID, TOKENS),
    "forward_verify_batch": (_rows(ID, TOKENS),),
    "capture": (ID, TOKENS),
    "score_batch": (_rows(ID, TOKENS, TOKENS),),
    "unified_forward": (UNIFIED,),
    "unified_forward_with_logits_policy": (UNIFIED, POLICIES),
    "release": (ID,),
    "truncate_kv": (ID, LENGTH),
    "fork": (ID, ID),
    "prepare": (ID, LENGTH),
    "prepare_kv_capacity": (ID, LENGTH),
    "kv_len": (ID,),
    "kv_block_table": (ID,),
    "kv_cache": (ID, st.integers(0, 2)),
    "reserve_kv_slots": (several(REQUEST),),
    "set_lora_adapter_for_cache": (ID, st.one_of(st.none(), ADAPTER)),
    "load_lora": (st.sampled_from(["one", "two"]), st.just(Later("folder"))),
    "unload_lora": (st.sampled_from(["one", "two"]),),
}
EXECUTOR_CALLS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "prefill": (PREFILL,),
    "batch_prefill": (several(PREFILL),),
    "decode": (DECODE,),
    "batch_decode": (several(DECODE),),
    "unified_decode": (several(ITEM).map(lambda items: Built(UnifiedBatch, {"items": items})),),
    "forward_verify": (several(DECODE),),
    "speculative_decode": (DECODE, TOKENS, st.floats(0, 1)),
    "truncate_kv": (HANDLE, LENGTH),
    "forward": (ARRAY,),
    "handle": (ID,),
    "release_cache": (ID,),
    "truncate_kv_for_cache_id": (ID, LENGTH),
    "reserve_kv_slots": (several(REQUEST),),
    "supports_batch_size": (LENGTH,),
}
HANDLE_CALLS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "key_cache": (st.integers(0, 2),),
    "value_cache": (st.integers(0, 2),),
    "with_sequence_length": (LENGTH,),
    "stats": (),
    "is_valid": (),
    "clone_handle": (),
}


@dataclass(frozen=True)
class Asked:
    """One call: of what, which method, with which arguments."""

    of: str
    method: str
    arguments: tuple[Any, ...]

    def make(self, scene: Scene) -> Any:
        target = {"runner": scene.runner, "executor": scene.executor}.get(self.of) or scene.handles[self.of]
        return getattr(target, self.method)(*[resolve(one, scene) for one in self.arguments])


def _asked(of: str, calls: Mapping[str, tuple[st.SearchStrategy[Any], ...]]) -> st.SearchStrategy[Asked]:
    return st.one_of(
        *(
            st.builds(Asked, st.just(of), st.just(name), st.tuples(*map(maybe, arguments)))
            for name, arguments in calls.items()
        )
    )


CALLS = st.one_of(
    _asked("runner", RUNNER_CALLS),
    _asked("executor", EXECUTOR_CALLS),
    *(_asked(of, HANDLE_CALLS) for of in ("live", "stale", "released")),
)
