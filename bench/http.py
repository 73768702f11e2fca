"""What does a request over HTTP cost, beside the same request in this process?

Requests arrive at times drawn beforehand (Poisson), as a public load generator sends them: each streams over a
connection of its own, from another process on the same machine. Prompts and answers are as long as conversations
are, log-normal with the means that ShareGPT's have, 215 and 198 tokens (`--scale` divides both); what is longer than a
sequence may be is drawn again. The ceiling is the scheduler in this process with the same requests, in turn with the
server. Overhead is the difference of the two times with everything there at once, for each token; on a machine of few
cores that is also what the load generator takes of them. The server's own is the processor time of the thread that has
its event loop. Time to first token (TTFT) counts from the arrival, time per output token (TPOT) is the mean over an
answer. `--llama-server` names the program of llama.cpp, which gets the same requests at the same times, over the same
weights in float32.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench import card, models, traffic
from bench.llama_server import LlamaServer
from bench.setting import start
from bench.timing import forbid_compiles
from bench.traffic import Arrival, Served, percentiles, poisson
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.scheduler import Scheduler
from ferrum_jax.serve.server import running
from ferrum_jax.serve.settings import ServerSettings
from ferrum_jax.weights import hub

SHARES, SMOKE_SHARES = (0.5, 0.8), (0.5,)  # of what is finished at most
PROMPT, ANSWER = (4.8, 1.06), (4.6, 1.17)  # mean and deviation of the logarithm: 215 and 198 tokens on average
LONGEST, SMOKE_LONGEST = (512, 256), (16, 8)  # tokens of a prompt and of an answer
CHUNK, SMOKE_CHUNK = 512, 32  # tokens of prompts in one step
ROUNDS = 3
SMOKE_ENGINE = EngineConfig(max_seqs=4, kv_capacity=32, max_step_tokens=SMOKE_CHUNK, decode_rows=(4,))


def main() -> None:
    """Measures both with everything at once, then the server at each rate, and prints the table and the JSON line."""
    found = card.options(__doc__, timed=False, more=_more)
    if found.llama_server is not None:
        models.check_has_files(found.model)
    setting = start(found, _engine(), SMOKE_ENGINE)
    runner, count = setting.runner, found.requests or (8 if found.smoke else 64)
    llm = LLM.from_model(runner)
    scheduler = Scheduler(runner, max_rows=runner.plan.max_seqs, chunk_tokens=SMOKE_CHUNK if found.smoke else CHUNK)
    at_once = _arrivals(runner, [0.0] * count, found.scale, smoke=found.smoke)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(llm, ServerSettings(model="bench", max_waiting=count)))
        paths: dict[str, Callable[[list[Arrival]], tuple[list[Served], float]]] = {
            "in process": lambda arrivals: traffic.serve(scheduler, arrivals),
            "HTTP": lambda arrivals: _over_http(server.host, server.port, "/v1/completions", arrivals, _ours),
        }
        if found.llama_server is not None:
            file, rows_at_once = Path(hub.resolve(found.model)), runner.plan.max_seqs
            peer = LlamaServer(found.llama_server, file, rows=rows_at_once, capacity=runner.kv_capacity())
            stack.enter_context(peer)
            paths["llama.cpp"] = lambda arrivals: _over_http(peer.host, peer.port, "/completion", arrivals, _theirs)
        for serve in paths.values():
            serve(at_once[: runner.plan.max_seqs])  # warms
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in paths}
        with forbid_compiles():
            for _ in range(1 if found.smoke else ROUNDS):
                for name, serve in paths.items():
                    before = _loop_seconds()
                    rounds[name].append(_summary(*serve(at_once)) | {"loop_s": _loop_seconds() - before})
        middle = {name: _middle(each) for name, each in rounds.items()}
        own, over = middle["in process"], middle["HTTP"]
        rows += [{"path": name, "share": None, **one} for name, one in middle.items()]
        for share in SMOKE_SHARES if found.smoke else SHARES:
            times = poisson(share * over["requests_per_second"], count, seed=1)
            arrivals = _arrivals(runner, times, found.scale, smoke=found.smoke)
            with forbid_compiles():
                rows += [{"path": name, "share": share, **_summary(*serve(arrivals))} for name, serve in paths.items()]
    llm.close()
    num_tokens = sum(one.params.max_tokens or 0 for one in at_once)
    loop = over["loop_s"] / num_tokens * 1e6
    overhead = (1 / over["tokens_per_second"] - 1 / own["tokens_per_second"]) * 1e6
    _show(rows)
    print(f"HTTP has {over['tokens_per_second'] / own['tokens_per_second']:.1%} of the throughput in process: "
          f"{overhead:.0f} us a token, of which the server's thread works {loop:.0f}")  # fmt: skip
    setting.finish("http", rows, overhead_us=overhead, loop_us=loop, scale=found.scale)


def _loop_seconds() -> float:
    """Returns the processor time of the thread that has the server's event loop."""
    (thread,) = [one for one in threading.enumerate() if one.name == "ferrum-serve"]
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=card.at_least_one, help="at each rate [64]")
    parser.add_argument("--scale", type=card.above_zero, default=1.0, help="divides all lengths [1]")
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM", help="llama.cpp's server, to be measured too")


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


def _ours(one: Arrival) -> dict[str, Any]:
    """Returns a request for this project's server."""
    return {"prompt": one.prompt, "max_tokens": one.params.max_tokens, "temperature": 0, "return_token_ids": True}


def _theirs(one: Arrival) -> dict[str, Any]:
    """Returns the same for llama.cpp's: nothing is reused, and no token ends an answer early."""
    asked = {"prompt": one.prompt, "n_predict": one.params.max_tokens, "temperature": 0, "cache_prompt": False}
    return asked | {"ignore_eos": True, "return_tokens": True}


def _over_http(
    host: str, port: int, path: str, arrivals: list[Arrival], ask: Callable[[Arrival], dict[str, Any]]
) -> tuple[list[Served], float]:
    """Sends requests from another process; gives what became of them, and the seconds to the last token."""
    plan = [{"at": one.at, "path": path, "body": ask(one)} for one in arrivals]
    command = [sys.executable, "-m", "bench.http_client", host, str(port)]
    done = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the load generator failed: {done.stderr}")
    found = [Served(told["due"], 0, told["times"]) for told in json.loads(done.stdout)]
    for one, served in zip(arrivals, found, strict=True):
        if len(served.token_times) != one.params.max_tokens:
            raise SystemExit(f"an answer has {len(served.token_times)} tokens, {one.params.max_tokens} were asked for")
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
