"""How long do requests wait, by how many arrive each second?

Open loop: requests arrive at times drawn beforehand (Poisson), whether or not the scheduler is ready for them, and run
through it in this process, greedily. Prompts have 32 to 256 tokens and answers 16 to 64, drawn evenly. The ceiling is
what is finished in a second when all requests are there at once; the rates are shares of it. Time to first token (TTFT)
counts from the arrival, time per output token (TPOT) is the mean over an answer, and goodput is the requests a second
that kept within both limits, `--ttft-limit` and `--tpot-limit`. Before that, with all rows decoding 256 tokens after
32, the rate of `LLM.generate`, greedy and drawn, stands beside that of the compiled decode step, alone and with the
sampler after it.
"""

import argparse
from typing import Any

import jax
import numpy as np

from bench import card, models, traffic
from bench.generation import measure_generation
from bench.setting import start
from bench.timing import forbid_compiles
from bench.traffic import Arrival, goodput, percentiles, poisson, serve
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.scheduler import Scheduler

SHARES, SMOKE_SHARES = (0.25, 0.5, 0.75, 0.9, 1.1), (0.5, 1.0)  # of what is finished at most
PROMPTS, SMOKE_PROMPTS = (32, 256), (4, 24)  # tokens, least and most
ANSWERS, SMOKE_ANSWERS = (16, 64), (2, 6)
CHUNK, SMOKE_CHUNK = 512, 32  # tokens of prompts in one step
SMOKE_ENGINE = EngineConfig(
    max_seqs=4,
    kv_capacity=32,
    max_step_tokens=SMOKE_CHUNK,
    decode_rows=(4,),
)
DECODED, SMOKE_DECODED = (32, 256), (4, 16)  # tokens of prompt and answer where `LLM.generate` decodes in all rows
ROUNDS = 5  # of `LLM.generate` and its programs
TEMPERATURES = (0.0, 0.8)


def main() -> None:
    """Finds the ceiling, runs every rate, and prints the table and the JSON line."""
    setting = start(card.options(__doc__, timed=False, more=_more), _engine(), SMOKE_ENGINE)
    found, runner = setting.found, setting.runner
    chunk = SMOKE_CHUNK if found.smoke else CHUNK
    count = found.requests or (8 if found.smoke else 100)
    beside = [_generate(runner, temperature, smoke=found.smoke) for temperature in TEMPERATURES]
    scheduler = Scheduler(runner, max_rows=runner.plan.max_seqs, chunk_tokens=chunk)
    at_once = _arrivals(runner, [0.0] * count, smoke=found.smoke)
    serve(scheduler, at_once[: runner.plan.max_seqs])  # warms
    with forbid_compiles():
        served, seconds = serve(scheduler, at_once)
    most = len(served) / seconds
    tokens = sum(len(one.token_times) for one in served) / seconds
    print(f"all at once: {most:.2f} requests/s, {tokens:.0f} tokens/s")
    limits = {"ttft_ms": found.ttft_limit, "tpot_ms": found.tpot_limit}
    rows = []
    for share in SMOKE_SHARES if found.smoke else SHARES:
        arrivals = _arrivals(runner, poisson(share * most, count, seed=1), smoke=found.smoke)
        with forbid_compiles():
            rows.append({"share": share, "rate": share * most, **_measure(scheduler, arrivals, limits)})
    _show(rows)
    print(f"good: the first token within {limits['ttft_ms']:.0f} ms, others within {limits['tpot_ms']:.0f} ms each")
    setting.finish(
        "serve", rows, limits=limits, most_requests_per_second=most, most_tokens_per_second=tokens, generate=beside
    )


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=card.at_least_one, help="that arrive at each rate [100]")
    parser.add_argument("--ttft-limit", type=card.above_zero, default=1000.0, metavar="MS", help="[1000]")
    parser.add_argument("--tpot-limit", type=card.above_zero, default=100.0, metavar="MS", help="[100]")


def _engine() -> EngineConfig:
    rows = 8 if jax.default_backend() == "cpu" else 64
    return EngineConfig(
        max_seqs=rows,
        kv_capacity=PROMPTS[1] + ANSWERS[1],
        max_step_tokens=CHUNK,
        decode_rows=(1, 4, rows),
    )


def _generate(runner: ModelRunner, temperature: float, *, smoke: bool) -> dict[str, float]:
    """Prints how near `LLM.generate` comes to its compiled programs, with all rows busy, and returns that."""
    context, tokens = SMOKE_DECODED if smoke else DECODED
    rounds, rows = 1 if smoke else ROUNDS, runner.plan.max_seqs
    found = measure_generation(runner, rows, context=context, tokens=tokens, temperature=temperature, rounds=rounds)
    over_step, over_both = found.bare_us / found.call_us, found.sampled_us / found.call_us
    print(
        f"{rows} rows at temperature {temperature:g}: LLM.generate decodes {found.rate:.0f} tokens/s, {over_step:.1%} "
        f"of the rate of the compiled step alone, {over_both:.1%} of that of the step and the sampler after it"
    )
    return {
        "rows": rows,
        "temperature": temperature,
        "tokens_per_second": found.rate,
        "step_us": found.bare_us,
        "step_and_sampler_us": found.sampled_us,
        "over_step": over_step,
        "over_step_and_sampler": over_both,
    }


def _arrivals(runner: ModelRunner, times: list[float], *, smoke: bool) -> list[Arrival]:
    """Returns requests for these times, of the same lengths in every call."""
    prompts, answers = (SMOKE_PROMPTS, SMOKE_ANSWERS) if smoke else (PROMPTS, ANSWERS)
    draw = np.random.default_rng(0)
    return [
        Arrival(
            at,
            models.prompt(runner.model_config, int(draw.integers(*prompts, endpoint=True)), seed=index),
            SamplingParams(max_tokens=int(draw.integers(*answers, endpoint=True))),
        )
        for index, at in enumerate(times)
    ]


def _measure(scheduler: Scheduler, arrivals: list[Arrival], limits: dict[str, float]) -> dict[str, Any]:
    served, seconds = serve(scheduler, arrivals)
    good = goodput(served, seconds, **limits)
    return {
        "requests": len(served),
        "requests_per_second": len(served) / seconds,
        "goodput": good,
        "good_share": good * seconds / len(served),
        "tokens_per_second": sum(len(one.token_times) for one in served) / seconds,
        **percentiles("ttft", [one.ttft_ms for one in served]),
        **percentiles("tpot", [one.tpot_ms for one in served]),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    headings = ["of most", "arrive/s", "done/s", "good/s", "good", "tokens/s"]
    headings += ["TTFT ms p50", "p90", "p99", "TPOT ms p50", "p90", "p99"]
    keys = [f"{name}_{share}_ms" for name in ("ttft", "tpot") for share in traffic.SHARES]
    lines = []
    for row in rows:
        cells = [f"{row['share']:.0%}", f"{row['rate']:.2f}", f"{row['requests_per_second']:.2f}"]
        cells += [f"{row['goodput']:.2f}", f"{row['good_share']:.0%}", f"{row['tokens_per_second']:.0f}"]
        lines.append([*cells, *(f"{row[key]:.1f}" for key in keys)])
    card.show_table(headings, lines)


if __name__ == "__main__":
    main()
