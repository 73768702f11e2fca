"""Does `ferrum-jax plan` predict the time of a step on this machine, and what does it predict for others?

The decode steps and prompts of a model are timed in turn with the probes of the machine, whose rates then are the
device of the plan: the time predicted is the roofline's, which a step cannot beat but by what the machine moves. Then,
without measuring anything, the plans of four large models for three machines, published throughputs beside those that
a plan gives in the same setting, and the weak scaling of the 70B model from 1 to 64 devices. `--smoke` plans for a
smaller model.
"""

from dataclasses import replace
from typing import Any

from bench import card, models
from bench.bare import BareStep
from bench.machine import Machine as Measured
from bench.machine import Probes, ceilings
from bench.setting import start
from bench.timing import Contestant, alternate
from bench.weak_scaling import scale
from ferrum_jax.config import EngineConfig
from ferrum_jax.contract.errors import ResourceExhaustedError
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.planning.estimate import STEP_TOKENS, Deployment, estimate, time_step
from ferrum_jax.planning.machines import Machine, find_machine
from ferrum_jax.planning.subject import Subject, read_subject

DECODES = ((1, 256), (8, 256), (1, 1536), (8, 1536))  # rows, and positions that each holds
PROMPTS = (128, 512, 1024)  # tokens
SMOKE_DECODES, SMOKE_PROMPTS = ((1, 16), (3, 64)), (64,)
ENGINE = EngineConfig(max_seqs=8, kv_capacity=2048, decode_rows=(1, 8), query_blocks=(1, 2, 4, 8), block_tokens=128)
SMOKE_ENGINE = replace(ENGINE, max_seqs=3, kv_capacity=128, decode_rows=(1, 3), query_blocks=(1,), block_tokens=64)
PLANNED = ("llama-3.1-70b", "llama-3.1-405b", "qwen3-235b-a22b", "deepseek-v3")
PLACES = (("h100", 8), ("h200", 8), ("v5p", 16))
WEIGHTS = (None, "float8_e4m3fn")  # bfloat16, and 8 bits
SMOKE_PLANNED = ("qwen3-8b",)
# Tokens per second at most load, fp8 weights, prompts of 128 and answers of 2,048 tokens: TensorRT-LLM 1.0,
# docs/source/performance/perf-overview.md (Llama 3.3 70B has the shapes of 3.1).
ASKED, ANSWERED = 128, 2048  # tokens
PUBLISHED = (
    ("llama-3.1-70b", "h200", 1, 4336),
    ("llama-3.1-70b", "h100", 2, 6651),
    ("llama-3.1-405b", "h200", 8, 5348),
    ("llama-3.1-405b", "h100", 8, 4340),
    ("qwen3-235b-a22b", "h200", 8, 42821),
    ("qwen3-235b-a22b", "h100", 8, 19658),
)
COUNTS = (1, 2, 4, 8, 16, 32, 64)  # devices
SCALED = (("h100", 8), ("h100", 64), ("v5p", 8), ("v5p", 64))  # and the most that share one replica
CONTEXT, ROWS_PER_DEVICE = 8192, (8, 32)
BURST = 4  # calls in a row


def main() -> None:
    """Measures, plans, and prints the tables and the JSON line."""
    setting = start(card.options(__doc__), ENGINE, SMOKE_ENGINE)
    found, runner = setting.found, setting.runner
    rows = []
    for count, context in SMOKE_DECODES if found.smoke else DECODES:
        rows.append(_decode(runner, setting.probes, count, context, found.rounds))
    rows += [
        _prompt(runner, setting.probes, tokens, found.rounds) for tokens in (SMOKE_PROMPTS if found.smoke else PROMPTS)
    ]
    _show(rows)
    planned = [
        _plan(model, weights, device, count)
        for model in (SMOKE_PLANNED if found.smoke else PLANNED)
        for weights in WEIGHTS
        for device, count in PLACES
    ]
    _show_plans(planned)
    beside = [] if found.smoke else [_beside(*one) for one in PUBLISHED]
    _show_beside(beside)
    scaled = [
        row
        for device, widest in SCALED
        for per_device in ROWS_PER_DEVICE
        for row in _scale(SMOKE_PLANNED[0] if found.smoke else PLANNED[0], device, widest, per_device)
    ]
    _show_scaling(scaled)
    setting.finish("plan", rows, plans=planned, published=beside, scaling=scaled)


def _decode(runner: ModelRunner, probes: Probes, count: int, context: int, rounds: int) -> dict[str, Any]:
    step = Contestant(BareStep.of(runner, count).at(context), burst=BURST)
    row = _compare(runner, probes, step, [(context, 1)] * count, rounds)
    return {"step": "decode", "rows": count, "positions": context} | row


def _prompt(runner: ModelRunner, probes: Probes, tokens: int, rounds: int) -> dict[str, Any]:
    ids = models.prompt(runner.model_config, tokens)
    call = Contestant(lambda: runner.prefill("0", ids), lambda: runner.release("0"))
    row = _compare(runner, probes, call, [(0, tokens)], rounds)
    runner.reset()
    return {"step": "prompt", "rows": 1, "positions": tokens} | row


def _compare(
    runner: ModelRunner, probes: Probes, call: Contestant, load: list[tuple[int, int]], rounds: int
) -> dict[str, Any]:
    times = alternate({"call": call} | probes.contestants, rounds=rounds)
    machine = ceilings(probes, times)
    subject = Subject(name="here", cfg=runner.model_config, dtype=runner.plan.cache.dtype)
    predicted = time_step(Deployment(subject=subject, machine=_here(machine), context=1), load)
    return {
        "measured_ms": times["call"].median,
        "measured_p90_ms": times["call"].p90,
        "predicted_ms": predicted.seconds * 1e3,
        "measured_over_predicted": times["call"].median / (predicted.seconds * 1e3),
        "limit": predicted.limit,
        "product_rate": round(machine.product_rate),
        "read_rate": round(machine.read_rate),
    }


def _here(measured: Measured) -> Machine:
    return Machine(
        name="here", platform="cpu", memory_bytes=1, memory_rate=measured.read_rate, bf16_rate=measured.product_rate
    )


def _plan(model: str, weights: str | None, device: str, count: int) -> dict[str, Any]:
    at = Deployment(subject=read_subject(model, weights), machine=find_machine(device), model=count, context=CONTEXT)
    try:
        return estimate(at).summary() | {"refused": None}
    except ResourceExhaustedError as problem:
        kept = {"model": model, "weights": at.subject.weights, "device": device, "mesh": {"model": count}}
        return kept | {"refused": str(problem)}


def _beside(model: str, device: str, count: int, published: int) -> dict[str, Any]:
    """As many sequences as fit at full length, each of them half answered, and the prompts that replace them."""
    subject = read_subject(model, "float8_e4m3fn")
    at = Deployment(subject=subject, machine=find_machine(device), model=count, context=ASKED + ANSWERED)
    rows = estimate(at).sequences
    decode, prompt = time_step(at, [(ASKED + ANSWERED // 2 - 1, 1)] * rows), time_step(at, [(0, STEP_TOKENS)])
    seconds = ANSWERED * decode.seconds + rows * ASKED / STEP_TOKENS * prompt.seconds
    predicted = rows * ANSWERED / seconds
    return {
        "model": model,
        "device": device,
        "devices": count,
        "rows": rows,
        "decode_ms": decode.seconds * 1e3,
        "limit": decode.limit,
        "predicted_tokens_per_second": predicted,
        "published_tokens_per_second": published,
        "published_over_predicted": published / predicted,
    }


def _scale(model: str, device: str, widest: int, per_device: int) -> list[dict[str, Any]]:
    at = Deployment(subject=read_subject(model), machine=find_machine(device), context=CONTEXT)
    cfg = at.subject.cfg
    counts = [count for count in COUNTS if min(count, widest) <= cfg.num_attention_heads]
    found = scale(at, counts, rows_per_device=per_device, widest=widest)
    kept = {"model": model, "device": device, "widest": widest, "rows_per_device": per_device}
    return [kept | {"size": row.model} | {k: v for k, v in row.summary().items() if k != "model"} for row in found]


def _show(rows: list[dict[str, Any]]) -> None:
    headings = "step", "rows", "positions", "measured ms", "p90", "predicted ms", "ratio", "limit"
    lines = []
    for row in rows:
        cells = [row["step"], f"{row['rows']}", f"{row['positions']}", f"{row['measured_ms']:.2f}"]
        cells += [f"{row['measured_p90_ms']:.2f}", f"{row['predicted_ms']:.2f}"]
        lines.append([*cells, f"{row['measured_over_predicted']:.2f}", row["limit"]])
    card.show_table(headings, lines, left=("step", "limit"))


def _show_plans(rows: list[dict[str, Any]]) -> None:
    headings = ("model", "weights", "devices", "params GB", "KV MB/seq", "fit", "rows", "decode ms", "of them coll.",
                "tokens/s", "limit", "prompt tokens/s", "limit")  # fmt: skip
    lines = []
    for row in rows:
        cells = [row["model"], row["weights"], f"{row['mesh']['model']} x {row['device']}"]
        if row["refused"] is not None:
            lines.append([*cells, *("-",) * 10])
            continue
        decode, prompt = row["decode"], row["prompt"]
        cells += [f"{row['parameter_bytes'] / 1e9:.1f}", f"{row['kv_bytes_per_sequence'] / 1e6:.0f}"]
        cells += [f"{row['sequences']}", f"{row['rows']}", f"{decode['step_ms']:.1f}", f"{decode['collective_ms']:.1f}"]
        cells += [f"{decode['tokens_per_second']:,.0f}", decode["limit"]]
        lines.append([*cells, f"{prompt['tokens_per_second']:,.0f}", prompt["limit"]])
    card.show_table(headings, lines, left=("model", "weights", "devices", "limit"))


def _show_beside(rows: list[dict[str, Any]]) -> None:
    headings = "model", "devices", "rows", "decode ms", "limit", "predicted tokens/s", "published", "ratio"
    lines = []
    for row in rows:
        cells = [row["model"], f"{row['devices']} x {row['device']}", f"{row['rows']}", f"{row['decode_ms']:.1f}"]
        cells += [row["limit"], f"{row['predicted_tokens_per_second']:,.0f}"]
        lines.append([*cells, f"{row['published_tokens_per_second']:,}", f"{row['published_over_predicted']:.2f}"])
    card.show_table(headings, lines, left=("model", "devices", "limit"))


def _show_scaling(rows: list[dict[str, Any]]) -> None:
    headings = "device", "widest", "rows/device", "devices", "fits", "step ms", "padding", "collectives", "host"
    lines = []
    for row in rows:
        cells = [row["device"], f"{row['widest']}", f"{row['rows_per_device']}", f"{row['devices']}"]
        cells += ["yes" if row["fits"] else "no"]
        cells += [f"{row[name] * 1e3:.2f}" for name in ("step_s", "padding_s", "collective_s", "host_s")]
        lines.append([*cells, f"{row['tokens_per_second']:,.0f}", f"{row['efficiency']:.0%}"])
    card.show_table((*headings, "tokens/s", "efficiency"), lines, left=("device", "fits"))


if __name__ == "__main__":
    main()
