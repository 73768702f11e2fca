"""One of the processes of tests/executor/test_hosts.py: a model on two processes with two devices each, or on one.

Run as `python -m tests.executor.hosts_process JOB` with a description of the job in JSON; the environment says which
process it is. Process 0 writes its answers to the job's file, pickled.
"""

import contextlib
import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax

if __name__ == "__main__":  # a test that imports this has settings of its own
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)

import numpy as np

import ferrum_jax
from ferrum_jax import LLM  # before a model is loaded, as programs do
from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.contract import ActiveLoraAdapter, DecodeRun, GreedyArgmax, Sampling
from ferrum_jax.contract.errors import FerrumError, InvalidParameterError, RequestValidationError, UnsupportedError
from ferrum_jax.executor.batch import ScheduledRow, VerifiedTokens
from tests import tiny

ENGINE = ferrum_jax.EngineConfig(
    max_seqs=3, kv_capacity=64, block_size=8, decode_rows=(3,), query_blocks=(3,), block_tokens=8, verify_tokens=8,
    multi_step_tokens=4, prefix_cache=True, max_loras=1, max_lora_rank=4, layout="checkpoint",
)  # fmt: skip
MODEL = "llama31"
LEFT: list[Any] = []  # iterators of answers


def run_contract(runner: Any, job: dict[str, Any]) -> list[Any]:
    """Calls the methods of the contract, one after another; returns what they answer."""
    tokens, found = job["tokens"], []
    found.append(runner.prefill("a", tokens[:21]))
    found.append(runner.prefill("a", tokens[21:24]))
    found.append(runner.unified_forward([("a", tokens[24:25], 24, True), ("b", tokens[:9], 0, True)]))
    found.append(runner.decode_batch([("a", tokens[25], 25), ("b", tokens[9], 9)]))
    found.append(runner.forward_verify("b", tokens[10:15]))
    runner.fork("b", "c")
    found.append(runner.decode_batch([("c", 3, 15), ("b", 4, 15)]))
    runner.truncate_kv("c", 7)
    found.append(runner.prefill("c", tokens[:4]))
    found.append(runner.decode_batch_with_logits_policy([("a", 5, 26)], [GreedyArgmax()]))
    runner.release("b")
    found.append([(one.logprobs, one.greedy_ids) for one in runner.score_batch([("b", tokens[:20], tokens[1:21])])])
    run = DecodeRun(cache_id="b", token=7, pos=20, max_tokens=6, sampling=Sampling(temperature=0.9), seed=11)
    found.append([one.token_ids for one in runner.decode_n([run])])
    found += [runner.kv_cache("c", layer) for layer in range(runner.model_config.num_hidden_layers)]
    runner.release("b")
    if len(runner.placed.placement.devices) > 1:
        with contextlib.suppress(UnsupportedError):  # of every process, while the program is made
            runner.capture("b", tokens[:5], points=[("z", 0)])
            raise AssertionError("a mesh has captured what it does not have")
    captured = runner.capture("b", tokens[:20], hidden=(0, 2), attention_weights=(1,))
    found.append([captured.logits, captured.hidden[0], captured.hidden[2], captured.attention_weights[1]])
    runner.reset()
    found.append(runner.prefill("a", tokens[:30]))
    found.append(runner.prefill("b", tokens[:30]))  # whose first blocks are reused
    found.append(runner.cache_metrics_snapshot()["hits"])
    runner.reset()
    runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="one", path=job["adapter"]))
    found.append(runner.prefill("a", tokens[:12]))
    found.append(runner.unified_forward([("a", tokens[12:14], 12, True), ("b", tokens[:9], 0, True)]))
    runner.release("a")
    runner.release("b")
    other = tiny.tiny_params(tiny.CONFIGS[MODEL], seed=8)
    for live, weights, error in (("a", other, RequestValidationError), ("", {}, InvalidParameterError)):
        if live:
            found.append(runner.prefill(live, tokens[:9]))
        try:
            runner.set_params(weights)
        except error as problem:
            found.append(str(problem))
        runner.release(live or "a")
    runner.set_params(other)
    found.append(runner.prefill("a", tokens[:12]))
    runner.release("a")
    found.append(verified_within_masks(runner, tokens))
    interrupt_often(runner, tokens)
    found.append(runner.prefill("a", tokens[:30]))
    runner.release("a")
    runner.free_kv()
    runner.allocate_kv()
    llm = LLM.from_model(runner)
    wanted = [ferrum_jax.SamplingParams(temperature=0.8, seed=at, max_tokens=9) for at in range(5)]
    found.append([out.token_ids for out in llm.generate([tokens[: 5 + 4 * at] for at in range(5)], wanted)])
    return found


def verified_within_masks(runner: Any, tokens: list[int]) -> list[int]:
    """Verifies drafted tokens where only every second token is allowed; returns what was chosen."""
    runner.prefill("a", tokens[:9])
    masks = np.full((3, -(-runner.model_config.vocab_size // 32)), 0x55555555, np.int32)
    output = VerifiedTokens(SlotSettings(temperature=0.8, seed=3, has_masks=True), masks)
    (choices,) = runner.execute([ScheduledRow("a", np.array(tokens[9:12], np.int32), 9, output)]).result()
    runner.release("a")
    chosen = [one.token_id for one in choices]
    assert all(token % 2 == 0 for token in chosen)
    return chosen


def interrupt_often(runner: Any, tokens: list[int]) -> None:
    """Interrupts steps at several moments, as Ctrl-C does, and resets the runner each time."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    for milliseconds in (1, 3, 5, 8, 13, 21, 34):
        try:
            signal.setitimer(signal.ITIMER_REAL, milliseconds / 1000)
            while True:
                runner.prefill("i", tokens[:9])
                runner.decode("i", 5, 9)
                runner.release("i")
        except KeyboardInterrupt:
            runner.reset()


def generate_for_ever(runner: Any) -> None:
    """Generates until something fails; says when it begins, and what failed."""
    llm, rounds = LLM.from_model(runner), 0
    wanted = ferrum_jax.SamplingParams(max_tokens=20)
    while True:
        llm.generate([[5, 6, 7 + rounds % 20], [1, 2, 3]], wanted)
        rounds += 1
        if rounds == 1:
            print("generating", flush=True)


def leave(runner: Any) -> None:
    """Ends the program while answers are generated."""
    llm = LLM.from_model(runner)
    short, long = (ferrum_jax.SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 55))
    llm.generate([[1, 2, 3], [4, 5]], long)
    # The iterator is not closed before the interpreter ends.
    LEFT.append(llm.as_completed([[at, 5] for at in range(60)], [short] + [long] * 59))
    next(LEFT[0])
    sys.exit(3)


def prefill_for_ever(runner: Any, tokens: list[int]) -> None:
    """Reads one prompt again and again, as a call of the contract; says when it begins."""
    print("generating", flush=True)
    while True:
        runner.prefill("a", tokens)
        runner.release("a")


def refuse(job: dict[str, Any], who: str) -> None:
    """Loads a model that `who` has not, or has in another mesh, and runs it; after the error, lives for a minute."""
    is_other = os.environ["FERRUM_PROCESS_ID"] == who
    path = "nowhere" if is_other and "mesh" not in job else job["model"]
    mesh = job["mesh"] if is_other and "mesh" in job else {"model": 4}
    try:
        ferrum_jax.load(path, mesh=mesh, engine=ENGINE, artifacts=False, progress=False).prefill("a", [1, 2, 3])
    except FerrumError as problem:
        time.sleep(0.5)  # as a program does that cleans up first
        print(f"{type(problem).__name__}: {problem}", flush=True)
        if os.environ["FERRUM_PROCESS_ID"] == "0":
            time.sleep(60)
        raise


def main() -> None:
    job = json.loads(sys.argv[1])
    if job["do"] == "refuse":
        refuse(job, job["who"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
    began = time.perf_counter()
    mesh = {"model": 4} if os.environ.get("FERRUM_NUM_PROCESSES") else None
    runner = ferrum_jax.load(
        job["model"], mesh=mesh, engine=ENGINE, artifacts=job.get("artifacts", False), progress=False
    )
    if job["do"] == "prefill":
        prefill_for_ever(runner, job["tokens"])
    if job["do"] == "leave":
        leave(runner)
    if job["do"] == "generate":
        try:
            generate_for_ever(runner)
        except FerrumError as problem:
            print(f"{type(problem).__name__}: {problem}", flush=True)
        for call in (runner.reset, lambda: runner.prefill("x", [1, 2])):
            try:
                call()
            except FerrumError as problem:
                print(f"then {type(problem).__name__}: {problem}", flush=True)
        return
    with runner:
        answers = run_contract(runner, job)
        stats = runner.compile_stats()
    del stats["steps"]
    Path(job["file"]).write_bytes(pickle.dumps({"answers": answers, "stats": stats}))
    print(f"{time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
