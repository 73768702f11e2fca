"""What does prompt lookup gain where an answer repeats its prompt, and what does it cost where it does not?

Whole greedy answers, prompt included, plain and with prompt lookup, take turns over one runner. Both give the same
tokens (up to logits that are nearly equal), so the ratio of the times is the gain. The tasks: to copy a passage, to
edit it, and to write something new.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench import card, models
from bench.timing import Contestant, alternate
from ferrum_jax import LLM, SamplingParams
from ferrum_jax.config import EngineConfig
from ferrum_jax.generate.params import RequestOutput
from ferrum_jax.generate.speculation import Speculation
from ferrum_jax.generate.tokenizer import load_tokenizer
from ferrum_jax.weights import hub

PASSAGE = (
    "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote the weather in his book. "
    "In winter the storms came from the west, and the lamp burned until the morning. "
    "In summer the boats came home before the dark, and the keeper counted them from the window."
)
TASKS = {
    "copy": f"Repeat this text word for word:\n\n{PASSAGE}",
    "edit": f"Repeat this text word for word, but write `sailor` in place of `keeper`:\n\n{PASSAGE}",
    "new": "Write a short story about a baker who finds a letter in a loaf of bread.",
}
NUM_TOKENS = (4, 7)  # drafted at a time
ANSWER, SMOKE_ANSWER = 64, 12  # tokens
BATCHES = (1, 4)
ENGINE = EngineConfig(
    max_seqs=4,
    kv_capacity=512,
    decode_rows=BATCHES,
    verify_blocks=BATCHES,
    verify_tokens=NUM_TOKENS[-1] + 1,
    spec_tokens=NUM_TOKENS[-1],
)
SMOKE_ENGINE = replace(ENGINE, kv_capacity=128, max_step_tokens=64, verify_blocks=(4,))


def main() -> None:
    """Runs every task and prints the table and the JSON line."""
    found = card.options(__doc__)
    models.check_has_files(found.model)
    subject = models.read(found)
    runner = models.run(subject, SMOKE_ENGINE if found.smoke else ENGINE)
    conditions = card.show_card(subject, runner.plan.cache)
    runner.warmup(progress=True)
    llms = {0: LLM.from_model(runner, max_rows=4, chunk_tokens=512)}
    for count in NUM_TOKENS:
        llms[count] = LLM.from_model(runner, max_rows=4, chunk_tokens=512, speculation=Speculation(num_tokens=count))
    if found.smoke:
        pattern = models.prompt(runner.model_config, 8)
        prompts = {"copy": pattern * 3}
    else:
        reader = LLM.from_model(runner, load_tokenizer(hub.resolve(found.model)))
        prompts = {name: reader.chat_prompt([{"role": "user", "content": task}]) for name, task in TASKS.items()}
    answer = SMOKE_ANSWER if found.smoke else ANSWER
    rows = []
    for name, prompt in prompts.items():
        for batch in BATCHES:
            rows += _measure(name, llms, [prompt] * batch, answer, found.rounds)
    _show(rows)
    card.finish("speculative", found, conditions, rows)


def _measure(
    name: str, llms: dict[int, LLM], prompts: Sequence[list[int]], answer: int, rounds: int
) -> list[dict[str, Any]]:
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    outs: dict[int, list[RequestOutput]] = {}

    def run(count: int) -> None:
        outs[count] = llms[count].generate(list(prompts), params)

    times = alternate({str(count): Contestant(lambda count=count: run(count)) for count in llms}, rounds=rounds)
    plain = times["0"].median
    rows = []
    for count in NUM_TOKENS:
        drafted, accepted = (sum(getattr(out, field) for out in outs[count]) for field in ("drafted", "accepted"))
        timing = times[str(count)]
        rows.append(
            {
                "task": name,
                "batch": len(prompts),
                "num_tokens": count,
                "drafted": drafted,
                "accepted": accepted,
                "call_ms": timing.median,
                "call_p90_ms": timing.p90,
                "acceptance_rate": accepted / drafted if drafted else 0.0,
                "plain_tokens_per_second": len(prompts) * answer / plain * 1e3,
                "tokens_per_second": len(prompts) * answer / timing.median * 1e3,
                "plain_over_speculative": plain / timing.median,
                "answers_equal": [out.token_ids for out in outs[count]] == [out.token_ids for out in outs[0]],
            }
        )
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    headings = "task", "batch", "drafted at a time", "accepted", "plain tokens/s", "tokens/s", "ratio", "same answers"
    lines = []
    for row in rows:
        cells = [row["task"], f"{row['batch']}", f"{row['num_tokens']}"]
        cells += [f"{row['accepted']} of {row['drafted']} ({row['acceptance_rate']:.0%})"]
        cells += [f"{row['plain_tokens_per_second']:.1f}", f"{row['tokens_per_second']:.1f}"]
        lines.append([*cells, f"{row['plain_over_speculative']:.2f}", "yes" if row["answers_equal"] else "no"])
    card.show_table(headings, lines, left=("task",))


if __name__ == "__main__":
    main()
