"""How many tokens a second do rollouts give, and how long are all rows busy?

One call of `LLM.generate`: some prompts with many samples each, drawn at temperature 1. Some tokens, drawn evenly from
the vocabulary, end an answer, so that lengths have a long tail up to a limit. The ceiling is the compiled decode step
of all rows with the sampler after it, in the middle of the answers: what the device gives while every row is busy. Time
counts as busy while the step that runs has a token for every row. Prompts are to be read once, but for the last token,
which every sample reads in a step of its own.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench import card, models
from bench.bare import BareStep
from bench.setting import start
from bench.timing import Contestant, alternate, forbid_compiles
from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.config import EngineConfig
from ferrum_jax.executor.batch import SampledToken, ScheduledRow
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.params import SamplingParams

ROWS, SMOKE_ROWS = 32, 4
PROMPTS, SAMPLES, TOKENS, LIMIT = 8, 250, 96, 96  # tokens of each prompt, and of an answer at most
SMOKE = 2, 7, 9, 8  # the same
ENDS = 0.02  # share of the vocabulary that ends an answer


def main() -> None:
    """Generates all rollouts in one call and prints the table and the JSON line."""
    found = card.options(__doc__, more=_more)
    setting = start(found, _engine(ROWS, TOKENS + LIMIT), _engine(SMOKE_ROWS, SMOKE[2] + SMOKE[3]))
    runner = setting.runner
    prompts, samples, tokens, limit = SMOKE if found.smoke else (PROMPTS, found.samples, TOKENS, LIMIT)
    size, draw = runner.model_config.vocab_size, np.random.RandomState(0)
    ends = draw.choice(size, int(size * ENDS), replace=False).tolist()
    params = SamplingParams(max_tokens=limit, temperature=1.0, seed=0, n=samples, stop_token_ids=ends)
    texts = [models.prompt(runner.model_config, tokens, seed=at) for at in range(prompts)]
    llm, watched = LLM.from_model(runner), Watched(runner)
    llm.generate(texts, SamplingParams(max_tokens=2, temperature=1.0, seed=0, n=2))  # warms
    runner.reset()
    with forbid_compiles(), watched:
        began = time.perf_counter()
        outs = llm.generate(texts, params, progress=True)
        seconds = time.perf_counter() - began
    rows, lengths = runner.plan.max_seqs, np.array([len(out.token_ids) for out in outs])
    step = BareStep.of(runner, rows).sampled_at(tokens + limit // 2, SlotSettings(temperature=1.0))
    bare = alternate({"bare": Contestant(step, burst=5)}, rounds=found.rounds)["bare"].median
    result = {
        "rollouts": len(outs),
        "rows": rows,
        "seconds": seconds,
        "tokens": int(lengths.sum()),
        "tokens_per_second": float(lengths.sum() / seconds),
        "length_median": float(np.median(lengths)),
        "length_p90": float(np.quantile(lengths, 0.9)),
        "ceiling_tokens_per_second": rows / bare * 1e3,
        "busy_share": watched.busy_seconds / seconds,
        "prompt_tokens_read": watched.prompt_tokens,
        "prompt_tokens": prompts * tokens,
    }
    result["over_ceiling"] = result["ceiling_tokens_per_second"] / result["tokens_per_second"]
    _show(result)
    setting.finish("rollouts", [result])


class Watched:
    """Counts, while it is entered, how long steps have a token for every row, and the tokens of prompts they read."""

    def __init__(self, runner: ModelRunner):
        self.busy_seconds, self.prompt_tokens = 0.0, 0
        self._runner, self._execute = runner, runner.execute
        self._since: float | None = None  # when the step began that runs now, if it is full

    def __enter__(self) -> None:
        self._runner.execute = self._watch

    def __exit__(self, *_: object) -> None:
        self._runner.execute = self._execute
        self._count(None)

    def _watch(self, batch: Sequence[ScheduledRow]) -> Any:
        self.prompt_tokens += sum(row.num_tokens for row in batch if row.num_tokens > 1)
        sampled = sum(isinstance(row.output, SampledToken) for row in batch)
        now = time.perf_counter()
        self._count(now)
        self._since = now if sampled == self._runner.plan.max_seqs else None
        return self._execute(batch)

    def _count(self, now: float | None) -> None:
        if self._since is not None:
            self.busy_seconds += (time.perf_counter() if now is None else now) - self._since


def _engine(rows: int, capacity: int) -> EngineConfig:
    return EngineConfig(max_seqs=rows, kv_capacity=capacity, decode_rows=(1, max(2, rows // 4), rows))


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=card.at_least_one, default=SAMPLES, help=f"of each prompt [{SAMPLES}]")


def _show(row: dict[str, Any]) -> None:
    cells = [
        str(row["rollouts"]),
        str(row["tokens"]),
        f"{row['seconds']:.1f}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['ceiling_tokens_per_second']:.0f}",
        f"{row['over_ceiling']:.2f}",
        f"{row['busy_share']:.2f}",
        f"{row['prompt_tokens_read']} of {row['prompt_tokens']}",
    ]
    headings = "rollouts", "tokens", "seconds", "tokens/s", "ceiling", "over it", "all rows busy", "prompt tokens read"
    card.show_table(headings, [cells], left=())


if __name__ == "__main__":
    main()
