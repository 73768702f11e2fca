"""How long do whole requests take beside transformers' `generate` and llama.cpp in a server's loop?

Eight prompts of 128 tokens at once and 128 greedy tokens for each: `LLM.generate` beside the peers over the same
weights in one process, in turn. A peer runs in several settings, of which the fastest counts; llama.cpp reads the
prompts one after the other and then steps all sequences together, the likeliest tokens chosen in NumPy. `alike` is the
share of tokens before an answer first differs from ours: sums in another order choose another token sooner or later.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import card, models
from bench.models import WIDE
from bench.peers import find_peers
from bench.timing import Contestant, alternate
from ferrum_jax import LLM, SamplingParams
from ferrum_jax.executor.runner import ModelRunner

ROWS, PROMPT, ANSWER = 8, 128, 128  # sequences, tokens, tokens
SMOKE_ROWS, SMOKE_PROMPT, SMOKE_ANSWER = 2, 8, 4
OURS = "ours"


def main() -> None:
    """Times all sides in turn and prints the table and the JSON line."""
    found = card.options(__doc__)
    rows, prompt, answer = (SMOKE_ROWS, SMOKE_PROMPT, SMOKE_ANSWER) if found.smoke else (ROWS, PROMPT, ANSWER)
    subject = models.read(found)
    runner = models.run(subject, WIDE)
    conditions = card.show_card(subject, runner.plan.cache)
    runner.warmup(progress=True)
    peers, notes = find_peers(subject, runner.device)
    for peer, note in notes.items():
        print(f"no row for {peer}: {note}")
    prompts = [models.prompt(runner.model_config, prompt, seed=row) for row in range(rows)]
    sides = {OURS: _generate(runner, prompts, answer)}
    for name, peer in peers.items():
        sides |= {f"{name} {kind}": one for kind, one in peer.generate(prompts, answer).items()}
    tokens = {name: one.run() for name, one in sides.items()}
    for one in sides.values():
        one.restore()
    times = alternate(sides, rounds=found.rounds)
    rows_found = []
    for engine in (OURS, *peers):
        kind = min((name for name in sides if name.startswith(engine)), key=lambda name: times[name].median)
        rows_found.append(
            {
                "engine": engine,
                "setting": kind.removeprefix(engine).strip(),
                "seconds": times[kind].median / 1e3,
                "seconds_p90": times[kind].p90 / 1e3,
                "tokens_per_second": rows * answer / times[kind].median * 1e3,
                "over_ours": times[kind].median / times[OURS].median,
                "alike": _alike(tokens[OURS], tokens[kind]),
            }
        )
    _show(rows_found)
    card.finish("requests", found, conditions, rows_found, notes=notes, streams=rows, prompt=prompt, answer=answer)


def _generate(runner: ModelRunner, prompts: list[list[int]], count: int) -> Contestant:
    llm = LLM.from_model(runner)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)

    def answer() -> NDArray[np.int64]:
        return np.array([out.token_ids for out in llm.generate(prompts, params)])

    return Contestant(answer, llm.reset)  # no prompt is known from a call before


def _alike(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> float:
    return float(np.logical_and.accumulate(ours == theirs, axis=1).mean())


def _show(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        cells = [row["engine"], row["setting"], f"{row['seconds']:.2f}", f"{row['seconds_p90']:.2f}"]
        lines.append([*cells, f"{row['tokens_per_second']:.0f}", f"{row['over_ours']:.2f}", f"{row['alike']:.2f}"])
    headings = "engine", "fastest setting", "seconds", "p90", "tokens/s", "/ ours", "alike"
    card.show_table(headings, lines, left=("engine", "fastest setting"))


if __name__ == "__main__":
    main()
