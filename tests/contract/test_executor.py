"""What an executor of the six required methods does with the others."""

import asyncio
import builtins
from typing import Any

import numpy as np
import pytest

import ferrum_jax.contract
from ferrum_jax import contract
from ferrum_jax.contract import (
    DecodeInput,
    DecodeOutput,
    ExecutorCapabilities,
    ExecutorMetrics,
    ExecutorStatus,
    KvCacheHandle,
    ModelExecutor,
    ModelInfo,
    PrefillInput,
    PrefillOutput,
    UnifiedBatch,
)
from ferrum_jax.contract.errors import UnsupportedError


class Echo(ModelExecutor):
    """Answers with what it was given."""

    def info(self) -> ModelInfo:
        raise NotImplementedError

    def capabilities(self) -> ExecutorCapabilities:
        raise NotImplementedError

    def status(self) -> ExecutorStatus:
        raise NotImplementedError

    def metrics(self) -> ExecutorMetrics:
        raise NotImplementedError

    async def prefill(self, input: PrefillInput) -> PrefillOutput:
        assert input.kv_cache is not None
        return PrefillOutput(logits=input.input_ids, kv_cache=input.kv_cache)

    async def decode(self, input: DecodeInput) -> DecodeOutput:
        return DecodeOutput(logits=input.input_ids, kv_cache=input.kv_cache)


HANDLE: Any = object()
IDS = [np.array([[1]]), np.array([[2]])]


def test_batches_run_one_by_one():
    prefills = asyncio.run(Echo().batch_prefill([PrefillInput(input_ids=ids, kv_cache=HANDLE) for ids in IDS]))
    assert [out.logits for out in prefills] == IDS
    decodes = asyncio.run(Echo().batch_decode([DecodeInput(input_ids=ids, kv_cache=HANDLE) for ids in IDS]))
    assert [out.logits for out in decodes] == IDS


@pytest.mark.parametrize(
    ("method", "arguments", "match"),
    [
        ("unified_decode", (UnifiedBatch([]),), "unified decode"),
        ("forward_verify", ([],), "verify"),
        ("forward", (IDS[0],), "without a cache"),
    ],
)
def test_what_an_executor_does_not_offer_is_refused(method: str, arguments: tuple[Any, ...], match: str):
    with pytest.raises(UnsupportedError, match=f"Echo .*{match}"):
        asyncio.run(getattr(Echo(), method)(*arguments))


def test_what_an_executor_does_not_know_is_none_or_nothing():
    echo = Echo()
    asyncio.run(echo.warmup())
    asyncio.run(echo.shutdown())
    asyncio.run(echo.truncate_kv(HANDLE, 1))
    echo.release_cache("a")
    assert echo.kv_capacity() is None
    assert echo.reserve_kv_slots([]) is None
    assert echo.kv_slot_capacity_snapshot() is None
    assert echo.cache_metrics_snapshot() is None
    assert echo.lora_metrics_snapshot() is None
    assert not echo.supports_native_unified_decode()


@pytest.mark.parametrize(
    "name", ["ModelExecutor", "BatchModelExecutor", "SpeculativeExecutor", "ModelExecutorFactory", "ExecutorRegistry"]
)
def test_an_interface_is_abstract(name: str):
    with pytest.raises(TypeError, match="abstract"):
        getattr(contract, name)()


def test_the_stars_names_are_types_and_hide_no_builtin():
    names: dict[str, Any] = {}
    exec("from ferrum_jax.contract import *", names)
    del names["__builtins__"]
    assert set(names) == set(ferrum_jax.contract.__all__)
    assert not set(names) & set(dir(builtins))
    assert all(name[0].isupper() for name in names)
    assert ferrum_jax.TimeoutError is contract.errors.TimeoutError
    assert ferrum_jax.IOError is contract.errors.IOError
    assert isinstance(KvCacheHandle, type)
