"""How many sequences do two replicas admit beside one, and are prefixes reused as often?

The same requests go to `LLM.generate` over one runner and over two replicas of it (`mesh={"data": 2}`), each with a
pool of the same size: groups of prompts that share their first half, and single ones, of mixed lengths, more than
either can hold. Counted are the sequences that hold KV, on average over the time in which others wait and at most,
prefix hits, tokens that were not computed, and preemptions. The time is of a machine whose devices share its cores, and
says nothing of two devices.

A model of random weights on CPU devices; `JAX_NUM_CPU_DEVICES` is set to 2 if it is less.
"""

import threading
import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from bench import card, models
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor.from_params import from_params
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.sharding.devices import default_dtype, find_device

GROUPS, OF_GROUP, ALONE = 24, 8, 64  # groups of prompts, prompts of each, and prompts without a group
PREFIX, TOKENS = 64, 24  # tokens that a group shares, and tokens of each answer
AIM = 1.9  # times the sequences of one
ENGINE = EngineConfig(
    max_seqs=16, kv_capacity=160, block_size=16, prefix_cache=True, kv_blocks=64, decode_rows=(16,), block_tokens=32
)


def main() -> None:
    """Serves the load on both, and prints the table, the aim and the JSON line."""
    found = card.options(__doc__, timed=False)
    if found.model is not None:
        raise SystemExit(f"the model is a tiny random one, --model {found.model} contradicts that")
    jax.config.update("jax_platforms", "cpu")
    if jax.config.values["jax_num_cpu_devices"] < 2:
        jax.config.update("jax_num_cpu_devices", 2)
    subject = models.random("tiny random", models.TINY, default_dtype(find_device(None)))
    prompts = _prompts(4, 16) if found.smoke else _prompts(GROUPS, ALONE)
    rows = []
    conditions: dict[str, Any] = {}
    for count in (1, 2):
        engine = replace(ENGINE, mesh={"data": count})
        with from_params(subject.params, subject.config, engine=engine) as runner:
            conditions = conditions or card.show_card(subject, runner.plan.cache)
            runner.warmup(progress=True)
            rows.append({"replicas": count} | _serve(runner, prompts))
    headings = "replicas", "sequences", "at most", "prefix hits", "of look-ups", "tokens saved", "preempted", "seconds"
    card.show_table(headings, [[str(value) for value in row.values()] for row in rows])
    one, two = rows
    ratio = two["sequences"] / one["sequences"]
    print(f"aim: {AIM} times the sequences of one: {'reached' if ratio >= AIM else 'missed'} with {ratio:.2f}")
    hits = two["hit_rate"] / max(1e-9, one["hit_rate"])
    print(f"aim: as many prefix hits as one: {'reached' if hits >= 1 else 'missed'} with {hits:.2f} times the share")
    aims = [{"name": "admitted sequences", "aim": AIM, "found": ratio}, {"name": "hit rate", "aim": 1.0, "found": hits}]
    card.finish("replicas", found, conditions, rows, aims=aims)


def _prompts(groups: int, alone: int) -> list[list[int]]:
    """Draws prompts in mixed order."""
    rng, vocabulary = np.random.default_rng(7), models.TINY.vocab_size
    drawn: list[list[int]] = []
    for _ in range(groups):
        start = rng.integers(vocabulary, size=PREFIX).tolist()
        drawn += [start + rng.integers(vocabulary, size=rng.integers(4, PREFIX)).tolist() for _ in range(OF_GROUP)]
    drawn += [rng.integers(vocabulary, size=rng.integers(8, 2 * PREFIX)).tolist() for _ in range(alone)]
    return [drawn[at] for at in rng.permutation(len(drawn))]


def _serve(runner: ModelRunner, prompts: list[list[int]]) -> dict[str, Any]:
    replicas = getattr(runner, "replicas", [runner])
    llm, is_done = LLM.from_model(runner), threading.Event()
    counts: list[tuple[int, bool]] = []  # of sequences, and whether others wait

    def watch() -> None:
        while not is_done.wait(0.0005):
            held = sum(len(replica._pipeline.table.live) for replica in replicas)
            counts.append((held, bool(llm.engine.scheduler._waiting)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    outs = llm.generate(prompts, SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3))
    seconds = time.perf_counter() - started
    is_done.set()
    watcher.join()
    prefixes, crowded = runner.cache_metrics_snapshot(), [held for held, do_wait in counts if do_wait]
    return {
        "sequences": round(float(np.mean(crowded)), 2) if crowded else max(held for held, _ in counts),
        "most_sequences": max(held for held, _ in counts),
        "prefix_hits": prefixes["hits"],
        "hit_rate": round(prefixes["hits"] / (prefixes["hits"] + prefixes["misses"]), 3),
        "saved_tokens": prefixes["saved_prefill_tokens"],
        "preemptions": sum(out.preemptions for out in outs),
        "seconds": round(seconds, 2),
    }


if __name__ == "__main__":
    main()
