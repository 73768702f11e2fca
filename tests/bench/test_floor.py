"""The floor counts what the configuration says a step must do."""

from dataclasses import replace

import pytest

from bench import attention
from bench.floor import Work, decode_work, place, prefill_work, step_work
from bench.machine import Machine
from bench.models import TINY
from ferrum_jax.config import ExpertsConfig, LatentConfig


def test_the_work_of_a_token_is_what_the_configuration_says():
    # TINY: q and o 48 x 48, k and v 48 x 16, gate, up and down 48 x 112, two layers; a head of 193 x 48
    products, head = 2 * (2 * 48 * 48 + 2 * 48 * 16 + 3 * 48 * 112), 193 * 48
    work = decode_work(TINY, rows=3, context=9, itemsize=4)
    assert work.operations == 3 * (2 * (products + head) + 2 * 10 * 4 * 48)
    assert work.num_bytes == 4 * (products + head + 3 * 2 * 10 * 2 * 16)


LATENT = LatentConfig(kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10)
OF_LATENTS = replace(TINY, model_type="deepseek_v2", latent=LATENT, head_dim=LATENT.cached_dim)


def test_of_latents_one_vector_is_read_for_all_heads():
    some, more = (decode_work(OF_LATENTS, rows=1, context=context, itemsize=4) for context in (9, 18))
    assert more.num_bytes - some.num_bytes == 4 * 2 * 9 * (32 + 4)
    assert more.operations - some.operations == 2 * 9 * 2 * TINY.num_attention_heads * (32 + 4 + 32)


def test_attention_over_latents_does_the_fewer_operations_of_its_two_forms():
    layers, heads = TINY.num_hidden_layers, TINY.num_attention_heads
    head = 2 * 193 * 48
    token = step_work(OF_LATENTS, [(0, 1)], itemsize=4).operations - head - layers * 2 * heads * (8 + 4 + 10)
    expand = 32 * (8 + 10)  # one position's key and value, of one head
    for start, count in ((0, 40), (7, 1), (100, 10), (100, 40)):
        seen = count * start + count * (count + 1) // 2
        of_latents, expanded = (32 + 4 + 32) * seen, (8 + 4 + 10) * seen + expand * start
        found = step_work(OF_LATENTS, [(start, count)], itemsize=4).operations - head - token * count
        assert found == layers * 2 * heads * min(of_latents, expanded)
        assert (of_latents < expanded) == (count in (1, 10))


def test_an_attention_call_over_latents_has_keys_of_the_whole_latent_and_values_of_its_rank():
    work = attention._work(attention.Load(1, 1, 9), OF_LATENTS, "float32")
    assert (work.operations, work.num_bytes) == (2 * 6 * 10 * (32 + 4 + 32), 4 * 10 * TINY.num_key_value_heads * 36)


def test_a_prompt_of_one_token_is_a_decode_step_from_nothing():
    assert prefill_work(TINY, tokens=1, itemsize=4) == decode_work(TINY, rows=1, context=0, itemsize=4)


def test_the_floor_is_whichever_limit_is_higher():
    work = decode_work(TINY, rows=1, context=0, itemsize=4)
    by_reading = Machine(product_rate=1e15, read_rate=1e6)
    assert work.floor_ms(by_reading) == pytest.approx(work.num_bytes / 1e3)
    assert (work.limit(by_reading), work.limit(Machine(1e6, 1e15))) == ("reading", "products")


def test_a_mixed_step_reads_its_weights_once_and_does_the_work_of_both():
    decode = decode_work(TINY, rows=3, context=9, itemsize=4)
    chunk = step_work(TINY, [(16, 8)], itemsize=4)
    mixed = step_work(TINY, [(9, 1)] * 3 + [(16, 8)], itemsize=4)
    weights = 4 * (2 * (2 * 48 * 48 + 2 * 48 * 16 + 3 * 48 * 112) + 193 * 48)
    assert mixed.operations == decode.operations + chunk.operations
    assert mixed.num_bytes == decode.num_bytes + chunk.num_bytes - weights


def test_chunks_of_a_prompt_do_the_work_of_the_prompt_but_for_heads():
    whole = prefill_work(TINY, tokens=24, itemsize=4)
    parts = [step_work(TINY, [(at, 8)], itemsize=4) for at in (0, 8, 16)]
    assert sum(part.operations for part in parts) == whole.operations + 2 * 2 * 193 * 48


def test_a_window_is_seen_and_nothing_behind_it():
    windowed = replace(TINY, layer_windows=(4, None))
    narrow, wide = (decode_work(cfg, rows=1, context=9, itemsize=4) for cfg in (windowed, TINY))
    assert wide.operations - narrow.operations == 4 * 6 * 8 * (10 - 4)
    assert wide.num_bytes - narrow.num_bytes == 4 * 2 * 2 * 8 * (10 - 4)


def test_of_experts_those_are_multiplied_that_are_chosen_and_those_read_that_are_met():
    experts = ExpertsConfig(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=112, norm_topk_prob=True, sparse_layers=(True, True)
    )
    sparse = replace(TINY, model_type="qwen3_moe", experts=experts)
    one, ten = (decode_work(sparse, rows=rows, context=9, itemsize=4) for rows in (1, 10))
    dense, stack = decode_work(TINY, rows=1, context=9, itemsize=4), 2 * 3 * 48 * 112
    router = 2 * 8 * 48
    assert one.operations - dense.operations == 2 * (stack + router)  # two experts instead of one block
    assert one.num_bytes - dense.num_bytes == 4 * (stack + router)
    assert ten.num_bytes - one.num_bytes == pytest.approx(
        4 * (8 * stack * (0.75 - 0.75**10) + 9 * 2 * 10 * 2 * 16), abs=8
    )


def test_a_place_has_the_work_and_the_ceilings():
    assert place(Work(6, 3), Machine(2.4, 1.0)) == {
        "operations": 6,
        "num_bytes": 3,
        "product_rate": 2,
        "read_rate": 1,
    }


def test_on_an_accelerator_a_program_has_as_many_layers_of_attention_as_fit(monkeypatch: pytest.MonkeyPatch):
    short, long = Work(0, num_bytes=4_000_000), Work(0, num_bytes=1_000_000_000)
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    assert attention._num_layers(short) == 4
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert (attention._num_layers(short), attention._num_layers(long)) == (64, 4)
