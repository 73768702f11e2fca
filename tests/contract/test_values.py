import subprocess
import sys
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest

import ferrum_jax
from ferrum_jax.contract import (
    DataType,
    DecodeInput,
    Device,
    GreedyRepetitionPenalty,
    KvCacheHandle,
    KvSlotRequest,
    MemoryRequirements,
    ModelInfo,
    PrefillInput,
    PrefillOutput,
    UnifiedBatch,
    UnifiedBatchItem,
)
from ferrum_jax.contract.errors import InvalidParameterError, RequestValidationError

TYPES = [
    "LlmRuntimeConfig",
    "ModelInfo",
    "DataType",
    "Device",
    "LogitsReturnPolicy",
    "FullLogits",
    "GreedyArgmax",
    "TokenSelectionMask",
    "GreedyRepetitionPenalty",
    "KvSlotRequest",
    "KvSlotAllocation",
    "KvSlotReservation",
    "KvSlotCapacitySnapshot",
    "ActiveLoraAdapter",
    "UnifiedBatchItem",
    "UnifiedBatch",
    "PrefillInput",
    "PrefillOutput",
    "DecodeInput",
    "DecodeOutput",
    "KvCacheHandle",
    "ExecutorCapabilities",
    "AttentionType",
    "MemoryRequirements",
    "ExecutorStatus",
    "ExecutorMetrics",
    "ExecutorConfig",
    "ExecutorType",
    "DecoderOnlyLLM",
]


def test_every_type_is_importable_from_both_places():
    for name in TYPES:
        assert getattr(ferrum_jax, name) is getattr(ferrum_jax.contract, name)


def test_the_contract_imports_no_jax():
    code = "import sys, ferrum_jax, ferrum_jax.contract, ferrum_jax.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ferrum_jax.no_such_name


@pytest.mark.parametrize(
    ("kind", "size", "quantized"),
    [
        ("FP32", 4, False),
        ("BF16", 2, False),
        ("FP8", 1, True),
        ("INT4", 0.5, True),
        ("UINT8", 1, False),
        ("INT8", 1, True),
    ],
)
def test_a_dtype_knows_its_size_and_whether_it_is_quantized(kind: str, size: float, quantized: bool):
    assert DataType[kind].size_in_bytes == size
    assert DataType[kind].is_quantized is quantized


@pytest.mark.parametrize("text", ["cpu", "cuda:1", "tpu:0", "rocm:3"])
def test_a_device_is_read_back_as_it_is_written(text: str):
    assert str(Device.parse(text)) == str(Device(text)) == text


@pytest.mark.parametrize("text", ["gpu", "cuda:x", "", "cpu:1", "cuda:-1"])
def test_a_malformed_device_is_refused(text: str):
    with pytest.raises(InvalidParameterError, match=r"device"):
        Device.parse(text)


def test_estimated_size_is_parameters_and_a_fifth():
    info = ModelInfo(
        model_id="m",
        model_type="llama",
        num_parameters=1000,
        hidden_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        vocab_size=1,
        max_sequence_length=1,
        dtype=DataType.BF16,
        device=Device("cpu"),
    )
    assert info.estimated_size() == 2400


def test_total_memory_adds_its_parts():
    needs = MemoryRequirements(
        parameter_memory=1000, activation_memory_per_token=10, kv_cache_memory_per_token=3, overhead_memory=7
    )
    assert needs.calculate_total_memory(2, 5, 4) == 1000 + 10 * 10 + 3 * 10 * 4 + 7


def test_inputs_know_their_shape_and_refuse_another_rank():
    given = PrefillInput(input_ids=np.zeros((2, 5), np.int32))
    assert (given.batch_size(), given.sequence_length()) == (2, 5)
    with pytest.raises(RequestValidationError, match=r"input_ids has shape \[5\]"):
        PrefillInput(input_ids=np.zeros(5, np.int32)).batch_size()
    with pytest.raises(RequestValidationError, match="input_ids are no array"):
        PrefillInput(input_ids=[[1, 2], [3]]).sequence_length()


def test_lengths_of_any_integer_type_are_plain_from_then_on():
    length: Any = np.uint8(200)
    most: Any = np.uint32(7)
    asked = KvSlotRequest(cache_id="a", target_len=length, admission_target_len=most)
    assert (type(asked.target_len), asked.target_len) == (int, 200)
    assert (type(asked.admission_target_len), asked.admission_target_len) == (int, 7)


def test_the_last_tokens_logits_are_a_matrix():
    handle = create_autospec(KvCacheHandle, instance=True)
    logits = np.arange(24.0).reshape(1, 4, 6)
    np.testing.assert_array_equal(PrefillOutput(logits=logits, kv_cache=handle).last_token_logits(), logits[:, 3])
    assert DecodeInput(input_ids=np.zeros((3, 1), np.int32), kv_cache=handle).batch_size() == 3
    with pytest.raises(RequestValidationError, match=r"shape \[1, 0, 6\]: an empty sequence has no last token"):
        PrefillOutput(logits=logits[:, :0], kv_cache=handle).last_token_logits()


def test_a_unified_batch_counts_its_tokens_and_its_sampled_items():
    batch = UnifiedBatch(
        [
            UnifiedBatchItem(seq_id="a", q_tokens=[1, 2, 3], pos_offset=0, is_final_chunk=False),
            UnifiedBatchItem(seq_id="b", q_tokens=[4], pos_offset=7, is_final_chunk=True),
        ]
    )
    assert (batch.total_q_tokens(), batch.num_sampled_items()) == (4, 1)


def test_impossible_requests_cannot_be_built():
    with pytest.raises(RequestValidationError, match="target_len is -1"):
        KvSlotRequest(cache_id="a", target_len=-1)
    with pytest.raises(RequestValidationError, match="penalty is 0"):
        GreedyRepetitionPenalty(penalty=0.0, token_ids=[1])
