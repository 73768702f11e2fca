"""How fast is SmolLM2 in float32 beside transformers, and beside the machine's floor?

Both sides run the same weights in one process and take turns (ours, theirs, ours, theirs …), a few calls in a row each
for decoding, so that the noise of the machine falls on both. Decoding takes one step of rows that hold a given context
and then rolls it back; prefill runs a prompt into an empty sequence and asks for the last token's logits. Times are of
the contract's calls, from Python lists to logits in NumPy; of transformers' two caches the faster counts. The floor of
a row is the larger of its operations over the rate of a large matrix product and its bytes over the rate of reading a
large array, by probes that take turns with the rest.

transformers and torch come with the extra `reference`; without them the table has no column for them.
"""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import card, models
from bench.floor import Work, decode_work, prefill_work
from bench.machine import Probes, ceilings, make_probes, measure
from bench.timing import Contestant, alternate
from ferrum_jax.executor.runner import ModelRunner

if TYPE_CHECKING:
    from bench.peer import Peer

DECODES = ((1, 256), (8, 256), (1, 1024), (8, 1024))  # rows, positions they hold
PREFILLS = (128, 512)  # tokens
BURST = 4  # decode calls in a row
AIMS = {"decode 1 at 256": 1.5, "decode 8 at 256": 1.0, "prefill 512": 0.9}  # transformers' time over ours, at least
AGREEMENT = 0.02  # largest difference of logits, which reach 30; float32 sums in another order give a tenth of it


@dataclass(frozen=True)
class Race:
    """One row of the table before it is run."""

    name: str
    work: Work
    contestants: dict[str, Contestant]  # ours, and transformers' by kind of cache


def main() -> None:
    """Runs every row and prints the table, the aims and the JSON line."""
    found = card.options(__doc__)
    subject = models.read(found, "float32")
    probes = make_probes("float32", smoke=found.smoke)
    runner = models.run(subject, models.WIDE)
    conditions = card.show_card(subject, runner.plan.cache, measure(probes))
    runner.warmup(progress=True)
    peer, note = _peer(subject, runner)
    if note:
        print(f"no column for transformers: {note}")
    rows = [_run(race, probes, found.rounds) for race in _races(runner, peer)]
    _show(rows)
    aims = [_judge(name, aim, rows) for name, aim in AIMS.items()]
    farthest = max(rows, key=lambda row: row["ours_over_floor"])
    print(f"farthest from its floor: {farthest['row']}, at {farthest['ours_over_floor']:.2f} times it")
    if found.smoke:
        print("a smoke run: none of these figures means anything")
    card.finish("compare", found, conditions, rows, aims=aims, note=note, farthest_from_floor=farthest["row"])


def _peer(subject: models.Subject, runner: ModelRunner) -> "tuple[Peer | None, str]":
    """Gives transformers' model, or None and why there is none."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return None, f"{' and '.join(missing)} missing, the extra `reference` brings them"
    if runner.device.platform != "cpu":
        return None, f"it would run on the CPU, and this is a {runner.device.platform}"
    from bench.peer import Peer

    return Peer(subject), ""


def _races(runner: ModelRunner, peer: "Peer | None") -> Iterator[Race]:
    """Sets up one race after the other; what one holds is gone when the next is asked for."""
    cfg = runner.model_config
    for rows, context in DECODES:
        prompts = [models.prompt(cfg, context, seed=row) for row in range(rows)]
        contestants = {"ours": _decode(runner, prompts)}
        if peer is not None:
            contestants |= {
                kind: peer.decode(kind, prompts, models.TOKEN, burst=BURST) for kind in ("dynamic", "static")
            }
        work = decode_work(cfg, rows=rows, context=context, itemsize=4)
        yield Race(f"decode {rows} at {context}", work, contestants)
        runner.reset()
    for tokens in PREFILLS:
        ids = models.prompt(cfg, tokens)
        contestants = {"ours": Contestant(lambda ids=ids: runner.prefill("a", ids)[None], runner.reset)}
        if peer is not None:
            contestants["dynamic"] = peer.prefill(ids)
        yield Race(f"prefill {tokens}", prefill_work(cfg, tokens=tokens, itemsize=4), contestants)
        runner.reset()


def _decode(runner: ModelRunner, prompts: list[list[int]]) -> Contestant:
    """One step of rows with one token each; the call gives `[B, V]`."""
    context = len(prompts[0])
    for row, ids in enumerate(prompts):
        runner.prefill(str(row), ids)
    batch, restore = models.decodes(runner, len(prompts), context)
    return Contestant(lambda: np.stack(runner.decode_batch(batch)), restore, BURST)


def _run(race: Race, probes: Probes, rounds: int) -> dict[str, Any]:
    """Checks that all sides compute the same, then times them."""
    difference = _largest_difference(race)
    times = alternate(race.contestants | probes.contestants, rounds=rounds)
    medians = ", ".join(f"{name} {timing.median:.1f} ms" for name, timing in times.items())
    print(f"{race.name}: {medians}", file=sys.stderr, flush=True)
    machine, ours = ceilings(probes, times), times["ours"]
    theirs = {name: times[name] for name in race.contestants if name != "ours"}
    row: dict[str, Any] = {
        "row": race.name,
        "ours_ms": ours.median,
        "ours_p90_ms": ours.p90,
        "floor_ms": race.work.floor_ms(machine),
        "floor_limit": race.work.limit(machine),
        "product_rate": round(machine.product_rate),
        "read_rate": round(machine.read_rate),
        "ours_over_floor": ours.median / race.work.floor_ms(machine),
        "calls": ours.count,
    }
    if theirs:
        kind = min(theirs, key=lambda kind: theirs[kind].median)
        row |= {
            "transformers_ms": theirs[kind].median,
            "transformers_p90_ms": theirs[kind].p90,
            "transformers_cache": kind,
            "transformers_all_ms": {kind: timing.median for kind, timing in theirs.items()},
            "transformers_over_ours": theirs[kind].median / ours.median,
            "logits_difference": difference,
        }
    return row


def _largest_difference(race: Race) -> float:
    logits = {}
    for name, contestant in race.contestants.items():
        contestant.restore()
        logits[name] = contestant.run()
    worst = max(float(np.abs(theirs - logits["ours"]).max()) for theirs in logits.values())
    if not worst < AGREEMENT:
        raise RuntimeError(
            f"{race.name}: logits differ by up to {worst:.3g}, more than {AGREEMENT}: not the same model"
        )
    return worst


def _show(rows: list[dict[str, Any]]) -> None:
    with_peer = "transformers_ms" in rows[0]
    headings = ["row", "ours ms", "p90", "floor ms", "of", "ours / floor"]
    headings += ["transformers ms", "p90", "its cache", "transformers / ours"] if with_peer else []
    lines = []
    for row in rows:
        cells = [row["row"], f"{row['ours_ms']:.1f}", f"{row['ours_p90_ms']:.1f}", f"{row['floor_ms']:.1f}"]
        cells += [_ceiling(row), f"{row['ours_over_floor']:.2f}"]
        if with_peer:
            cells += [f"{row['transformers_ms']:.1f}", f"{row['transformers_p90_ms']:.1f}"]
            cells += [row["transformers_cache"], f"{row['transformers_over_ours']:.2f}"]
        lines.append(cells)
    card.show_table(headings, lines, left=("row", "of", "its cache"))


def _ceiling(row: dict[str, Any]) -> str:
    if row["floor_limit"] == "reading":
        return f"reading, {row['read_rate'] / 1e9:.0f} GB/s"
    return f"products, {row['product_rate'] / 1e9:.0f} GFLOP/s"


def _judge(name: str, aim: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints whether one row reached its aim, and gives that back."""
    ratio = next(row.get("transformers_over_ours") for row in rows if row["row"] == name)
    reached = None if ratio is None else ratio >= aim
    verdict = "not measured" if ratio is None else f"{'reached' if reached else 'missed'} with {ratio:.2f}"
    print(f"aim: {name} at least {aim:.1f} times as fast as transformers: {verdict}")
    return {"row": name, "aim": aim, "ratio": ratio, "reached": reached}


if __name__ == "__main__":
    main()
