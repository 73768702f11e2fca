"""What does a request over HTTP cost, beside the same request in this process?

Requests arrive at times drawn beforehand (Poisson), as a public load generator sends them: each streams over a
connection of its own, from another process on the same machine. Prompts and answers are as long as conversations
are, log-normal with the means that ShareGPT's have, 215 and 198 tokens (`--scale` divides both); what is longer than a
sequence may be is drawn again. The ceiling is the scheduler in this process with the same requests, in turn with the
server. Overhead is the difference of the two times with everything there at once, for each token. Time to first token
(TTFT) counts from the arrival, time per output token (TPOT) is the mean over an answer.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

import jax
import numpy as np

from bench import card, models, traffic
from bench.setting import start
from bench.timing import forbid_compiles
from bench.traffic import Arrival, Served, percentiles, poisson
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.scheduler import Scheduler
from ferrum_jax.serve.server import RunningServer, running
from ferrum_jax.serve.settings import ServerSettings

SHARES, SMOKE_SHARES = (0.5, 0.8), (0.5,)  # of what is finished at most
PROMPT, ANSWER = (4.8, 1.06), (4.6, 1.17)  # mean and deviation of the logarithm: 215 and 198 tokens on average
LONGEST, SMOKE_LONGEST = (512, 256), (16, 8)  # tokens of a prompt and of an answer
CHUNK, SMOKE_CHUNK = 512, 32  # tokens of prompts in one step
ROUNDS = 3
SMOKE_ENGINE = EngineConfig(max_seqs=4, kv_capacity=32, max_step_tokens=SMOKE_CHUNK, decode_rows=(4,))


def main() -> None:
    """Measures both with everything at once, then the server at each rate, and prints the table and the JSON line."""
    setting = start(__doc__, _engine(), SMOKE_ENGINE, timed=False, more=_more)
    found, runner = setting.found, setting.runner
    count = (8 if found.smoke else 64) if found.requests is None else found.requests
    if count < 1:
        raise SystemExit(f"--requests is {count}, expected at least 1")
    llm = LLM.from_model(runner)
    scheduler = Scheduler(runner, max_rows=runner.plan.max_seqs, chunk_tokens=SMOKE_CHUNK if found.smoke else CHUNK)
    at_once = _arrivals(runner, [0.0] * count, found.scale, smoke=found.smoke)
    rows: list[dict[str, Any]] = []
    with running(llm, ServerSettings(model="bench", max_waiting=count)) as server:
        traffic.serve(scheduler, at_once[: runner.plan.max_seqs])  # warms
        _over_http(server, at_once[: runner.plan.max_seqs])
        inside, outside = [], []
        with forbid_compiles():
            for _ in range(1 if found.smoke else ROUNDS):
                inside.append(_summary(*traffic.serve(scheduler, at_once)))
                outside.append(_summary(*_over_http(server, at_once)))
        own, over = _middle(inside), _middle(outside)
        rows += [{"path": "in process", "share": None, **own}, {"path": "HTTP", "share": None, **over}]
        for share in SMOKE_SHARES if found.smoke else SHARES:
            times = poisson(share * over["requests_per_second"], count, seed=1)
            arrivals = _arrivals(runner, times, found.scale, smoke=found.smoke)
            with forbid_compiles():
                rows.append({"path": "in process", "share": share, **_summary(*traffic.serve(scheduler, arrivals))})
                rows.append({"path": "HTTP", "share": share, **_summary(*_over_http(server, arrivals))})
    llm.close()
    overhead = (1 / over["tokens_per_second"] - 1 / own["tokens_per_second"]) * 1e6
    _show(rows)
    print(f"HTTP has {over['tokens_per_second'] / own['tokens_per_second']:.1%} of the throughput in process: "
          f"{overhead:.0f} us a token")  # fmt: skip
    setting.finish("http", rows, overhead_us=overhead, scale=found.scale)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, help="at each rate [64]")
    parser.add_argument("--scale", type=card.above_zero, default=1.0, help="divides all lengths [1]")


def _engine() -> EngineConfig:
    rows = 8 if jax.default_backend() == "cpu" else 64
    return EngineConfig(max_seqs=rows, kv_capacity=sum(LONGEST), max_step_tokens=CHUNK, decode_rows=(1, 4, rows))


def _arrivals(runner: ModelRunner, times: list[float], scale: float, *, smoke: bool) -> list[Arrival]:
    """Returns requests for these times, of the same lengths in every call."""
    draw, longest = np.random.default_rng(0), SMOKE_LONGEST if smoke else LONGEST

    def length(mean: float, deviation: float, most: int) -> int:
        while True:
            size = round(draw.lognormal(mean, deviation) / scale)
            if 2 <= size <= most:
                return size

    return [
        Arrival(
            at,
            models.prompt(runner.model_config, length(*PROMPT, longest[0]), seed=index),
            SamplingParams(max_tokens=length(*ANSWER, longest[1])),
        )
        for index, at in enumerate(times)
    ]


def _over_http(server: RunningServer, arrivals: list[Arrival]) -> tuple[list[Served], float]:
    """Sends requests from another process; gives what became of them, and the seconds to the last token."""
    plan = [
        {"at": one.at, "body": {"prompt": one.prompt, "max_tokens": one.params.max_tokens, "temperature": 0}}
        for one in arrivals
    ]
    command = [sys.executable, "-m", "bench.http_client", server.host, str(server.port)]
    done = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the load generator failed: {done.stderr}")
    found = [Served(told["due"], 0, told["times"]) for told in json.loads(done.stdout)]
    return found, max(one.token_times[-1] for one in found)


def _summary(served: list[Served], seconds: float) -> dict[str, Any]:
    return {
        "requests": len(served),
        "requests_per_second": len(served) / seconds,
        "tokens_per_second": sum(len(one.token_times) for one in served) / seconds,
        **percentiles("ttft", [one.ttft_ms for one in served]),
        **percentiles("tpot", [one.tpot_ms for one in served]),
    }


def _middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the round of the middle throughput."""
    return sorted(rounds, key=lambda one: one["tokens_per_second"])[len(rounds) // 2]


def _show(rows: list[dict[str, Any]]) -> None:
    headings = ["", "of most", "done/s", "tokens/s", "TTFT ms p50", "p90", "p99", "TPOT ms p50", "p90", "p99"]
    keys = [f"{name}_{share}_ms" for name in ("ttft", "tpot") for share in traffic.SHARES]
    lines = []
    for row in rows:
        share = "at once" if row["share"] is None else f"{row['share']:.0%}"
        cells = [row["path"], share, f"{row['requests_per_second']:.2f}", f"{row['tokens_per_second']:.0f}"]
        lines.append([*cells, *(f"{row[key]:.1f}" for key in keys)])
    card.show_table(headings, lines)


if __name__ == "__main__":
    main()
