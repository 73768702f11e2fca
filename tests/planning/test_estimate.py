"""What fits, how long it takes, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from ferrum_jax.contract.errors import ConfigError, ResourceExhaustedError
from ferrum_jax.models.specs import num_parameters
from ferrum_jax.planning.estimate import (
    Deployment,
    describe,
    estimate,
    most_sequences,
    parameter_bytes,
    time_step,
)
from ferrum_jax.planning.machines import MACHINES, find_machine
from ferrum_jax.planning.subject import read_subject
from ferrum_jax.planning.work import Collectives
from tests import tiny
from tests.planning.plans import TOY, deployment


def test_a_ring_moves_the_bytes_of_both_its_phases():
    reduced, gathered = (Collectives(kind, "", 1, 1000) for kind in ("all-reduce", "all-gather"))
    assert reduced.sent_bytes(8) == 2 * 7 / 8 * 1000
    assert gathered.sent_bytes(8) == 7 / 8 * 1000
    assert (reduced.hops(8), gathered.hops(8)) == (8, 4)


def test_a_step_takes_what_limits_it_and_its_collectives():
    at = deployment("llama31", rows=2, model=4)
    step = time_step(at, [(9, 1)] * 2)
    assert step.product_s == step.work.operations / 1e9
    assert step.memory_s == step.work.num_bytes / 1e7
    hidden, logits = 2 * 48 * 4, 2 * 100 * 4  # a vocabulary of 97 is 25 on each device
    assert step.collective_s == pytest.approx(8e-3 + (7 * 2 * hidden + logits) * 3 / 4 / 1e6)
    assert step.seconds == max(step.product_s, step.memory_s) + step.collective_s
    assert step.limit == "collectives"
    assert replace(step, collective_s=0.0).limit == "memory"
    assert replace(step, product_s=1.0).limit == "products"
    eight = time_step(replace(at, model=8), [(9, 1)] * 2)  # the far link, and hops of its ring
    sent = (7 * 2 * hidden + 2 * 104 * 4) * 7 / 8 / 1e5
    assert eight.collective_s == pytest.approx(8 * 3e-3 + (7 * 8 + 4) * 1e-3 + sent)


def test_rows_that_pad_a_step_are_sent_but_do_not_count():
    at = deployment("llama31", rows=3, model=4)
    exact, padded = (time_step(at, [(9, 1)] * 3, padded_rows=rows) for rows in (3, 4))
    assert [one.num_bytes for one in padded.collectives] == [one.num_bytes * 4 // 3 for one in exact.collectives]
    assert padded.tokens == exact.tokens == 3


def test_one_device_has_no_collectives():
    step = time_step(deployment("llama31"), [(9, 1)])
    assert (step.collectives, step.collective_s) == ([], 0.0)


def test_as_many_sequences_fit_as_the_engine_grants():
    at = deployment("llama31")
    free = 300_000
    granted = most_sequences(at, free)
    assert granted > 1
    at.engine(granted, free)
    with pytest.raises(ResourceExhaustedError):
        at.engine(granted + 1, free)
    assert most_sequences(at, 10) == 0


def test_an_estimate_counts_replicas_and_temporaries():
    at = deployment("llama31", model=2, memory_share=0.5)
    one, two = (estimate(replace(at, data=data)).summary() for data in (1, 2))
    for name in ("sequences", "rows"):
        assert two[name] == 2 * one[name]
    assert two["decode"]["tokens_per_second"] == pytest.approx(2 * one["decode"]["tokens_per_second"])
    assert one["parameter_bytes"] == sum(parameter_bytes(at).values())
    assert one["usable_bytes"] == 500_000
    assert estimate(at, 100_000).sequences < one["sequences"]


def test_what_does_not_fit_is_refused_with_the_meshes_that_have_room():
    small = replace(TOY, memory_bytes=400_000)
    at = deployment("llama31", small)
    with pytest.raises(
        ResourceExhaustedError, match=r"0 such sequences fit; it fits on model=2 or on model=4"
    ) as found:
        estimate(at)
    assert found.value.free == 360_000
    assert estimate(replace(at, model=2)).sequences > 0
    most = estimate(replace(at, model=2)).sequences
    assert estimate(replace(at, model=2, rows=most)).rows == most
    with pytest.raises(ResourceExhaustedError, match=f"{most} such sequences fit; it fits on model=4"):
        estimate(replace(at, model=2, rows=most + 1))
    with pytest.raises(ResourceExhaustedError, match="no larger mesh of toy"):
        estimate(deployment("llama31", replace(TOY, memory_bytes=100)))


def test_what_contradicts_itself_is_refused():
    refused: list[tuple[dict[str, Any], str]] = [
        ({"context": 161}, "context is 161, tiny has 1 to 160 positions"),
        ({"context": 0}, "context is 0, tiny has 1 to 160 positions"),
        ({"rows": 0}, "rows is 0"),
        ({"memory_share": 1.5}, "memory_share is 1.5"),
        ({"model": 16}, "16 toy: what connects them is known for up to 8 devices"),
    ]
    for settings, says in refused:
        with pytest.raises(ConfigError, match=says):
            deployment("llama31", **settings)
    with pytest.raises(ConfigError, match="4 attention heads"):
        estimate(deployment("phi3_short", model=8))
    with pytest.raises(ConfigError, match="device is 'h1000', known are h100, h200"):
        find_machine("h1000")


def test_a_kv_of_eight_bits_holds_twice_as_much():
    plain, eight = (estimate(deployment("llama31", rows=2, kv_dtype=dtype)) for dtype in ("bf16", "fp8"))
    assert plain.kv_bytes_per_sequence == 2 * eight.kv_bytes_per_sequence
    assert plain.decode.work.kv_bytes == 2 * eight.decode.work.kv_bytes
    with pytest.raises(ConfigError, match="kv_dtype is 'int8'"):
        deployment("llama31", kv_dtype="int8")


def test_sequences_that_pass_the_original_positions_of_longrope_can_be_planned():
    for context, is_long in ((tiny.ORIGINAL, False), (100, True)):
        scaling = deployment("phi3_beyond", context=context).subject.cfg.rope_scaling
        assert scaling is not None
        assert scaling.is_long is is_long
    assert estimate(deployment("phi3_beyond", context=100)).rows
    with pytest.raises(ConfigError, match="has 1 to 160 positions"):
        deployment("phi3_beyond", context=161)


def test_every_machine_is_connected_and_reads_slower_than_it_multiplies():
    for machine in MACHINES.values():
        assert machine.link(8).bandwidth < machine.memory_rate < machine.bf16_rate
        assert [link.bandwidth for link in machine.links] == sorted((x.bandwidth for x in machine.links), reverse=True)
    assert find_machine("V5P").link(16).bandwidth == 200e9  # two links of 800 Gb/s
    assert find_machine("h100").link(9).name == "InfiniBand 400 Gb/s"


def test_a_description_has_every_part_of_a_plan():
    lines = describe(estimate(deployment("qwen2_moe", expert=2, model=2), 1234))
    text = " ".join(f"{name} {value}" for name, value in lines.items())
    for says in ("expert=2, model=2", "experts", "1.23 kB a device", "all-gather, logits", "limited by", "4 x toy"):
        assert says in text
    assert "not lowered" in describe(estimate(deployment("llama31")))["temporaries"]


def test_the_70b_model_on_eight_h100_is_what_its_parts_say():
    whole, layers = read_subject("llama-3.1-70b"), 4  # of 80, for time's sake
    cfg = replace(whole.cfg, num_hidden_layers=layers, layer_windows=(None,) * layers)
    at = Deployment(subject=replace(whole, cfg=cfg), machine=find_machine("h100"), model=8)
    norms = (2 * layers + 1) * 8192 * 2  # on every device
    assert sum(parameter_bytes(at).values()) == num_parameters(at.subject.specs) * 2 / 8 + norms * 7 / 8
    cached = at.engine(64).cache.num_bytes
    assert cached == 64 * 8192 * layers * 2 * 128 * 2  # one head of eight
    step = time_step(at, [(8191, 1)] * 64)
    assert step.work.kv_bytes == cached
    embeddings = 128256 // 8 * 8192 * 2  # are looked up
    assert step.work.weight_bytes == sum(parameter_bytes(at).values()) - norms - embeddings
    assert [(one.count, one.num_bytes) for one in step.collectives] == [
        (1, 64 * 8192 * 2), (2 * layers, 64 * 8192 * 2), (1, 64 * 128256 * 4)]  # fmt: skip
