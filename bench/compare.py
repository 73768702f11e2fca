"""How fast is SmolLM2 beside transformers and llama.cpp, and beside the machine's floor?

All sides run the same weights in one process and take turns (ours, theirs, ours, theirs …), a few calls in a row each
for decoding, so that the noise of the machine falls on all: in float32 on a CPU, elsewhere in bfloat16. Decoding takes
one step of rows that hold a given context and then rolls it back; prefill runs a prompt into an empty sequence and asks
for the last token's logits. Times are of the contract's calls, from Python lists to logits in NumPy. A peer runs in
several settings, of which the fastest counts; ours has its parameters laid out for serving (`--layout`). The floor of a
row is the larger of its operations over the rate of a large matrix product and its bytes over the rate of reading a
large array (bench/machine.py), by probes that take turns with the rest.

transformers and torch come with the extra `bench`, llama-cpp-python is built by hand (docs/benchmarks.md); a peer that
is not there has no columns.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from bench import card, models
from bench.agreement import AGREEMENT, run_once
from bench.floor import Work, decode_work, place, prefill_work
from bench.machine import Probes, ceilings, make_probes, measure
from bench.peers import Peer, find_peers
from bench.timing import Contestant, Timing, alternate
from ferrum_jax.config import LAYOUTS, EngineConfig
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.models.layout import layout_of
from ferrum_jax.sharding.devices import find_device

BURST = 4  # decode calls in a row


@dataclass(frozen=True)
class Course:
    """What is run on a kind of device, and what is aimed at."""

    engine: EngineConfig
    decodes: tuple[tuple[int, int], ...]  # rows, positions they hold
    prefills: tuple[int, ...]  # tokens
    long_rounds: int | None  # turns of the longest prompt that count, at most
    aims: Mapping[str, Mapping[str, float]]  # by peer and row: a peer's time over ours, at least
    floors: Mapping[str, float]  # by row: the floor over our time, at least


def _prefill(tokens: int) -> str:
    return f"prefill {tokens}"


CPU = Course(
    engine=models.WIDE,
    decodes=((1, 256), (8, 256), (1, 1024), (8, 1024)),
    prefills=(128, 512, 2048),
    long_rounds=3,
    aims={
        "transformers": {f"prefill {tokens}": 1.2 for tokens in (128, 512, 2048)},
        "llama.cpp": {f"decode {rows} at {at}": 1.4 if rows == 8 else 1.05 for rows in (1, 8) for at in (256, 1024)},
    },
    floors={
        **{f"decode {rows} at {at}": 1 / (1.6 if rows == 8 else 1.2) for rows in (1, 8) for at in (256, 1024)},
        "prefill 512": 1 / 1.4,
    },
)
ACCELERATED = Course(
    engine=EngineConfig(
        max_seqs=128,
        kv_capacity=8192 + 128,
        block_size=128,
        kv_blocks=128 * 9,  # as many rows as decode, of 1024 positions and one more
        max_step_tokens=2048,
        decode_rows=(1, 8, 32, 128),
        query_blocks=(16,),
    ),
    decodes=((1, 1024), (8, 1024), (32, 1024), (128, 1024)),
    prefills=(2048, 8192),
    long_rounds=None,
    aims={
        "transformers": {
            **{f"decode {rows} at 1024": 1.5 for rows in (1, 8, 32, 128)},
            **{f"prefill {tokens}": 1.5 for tokens in (2048, 8192)},
        }
    },
    floors={"decode 1 at 1024": 0.85, "decode 32 at 1024": 0.75, "prefill 2048": 0.65, "prefill 8192": 0.65},
)


def _more_options(reader: argparse.ArgumentParser) -> None:
    reader.add_argument("--layout", choices=LAYOUTS, help="of our parameters [the one they are served in by default]")
    reader.add_argument(
        "--most-rows", type=card.at_least_one, help="leave out decoding of more rows: a peer's KV may not fit [all]"
    )


@dataclass(frozen=True)
class Race:
    """One row of the table before it is run."""

    name: str
    work: Work
    ours: Contestant
    theirs: dict[str, dict[str, Contestant]]  # by peer and setting
    precisions: dict[str, str]  # of those that are not ours, by their name in `contestants`
    most_rounds: int | None  # that count

    @property
    def contestants(self) -> dict[str, Contestant]:
        """All sides, by a name of one piece."""
        named = {f"{peer} {kind}": one for peer, kinds in self.theirs.items() for kind, one in kinds.items()}
        return {"ours": self.ours} | named


def main() -> None:
    """Runs every row and prints the table, the aims and the JSON line."""
    found = card.options(__doc__, more=_more_options)
    subject = models.read(found)
    probes = make_probes(subject.dtype, smoke=found.smoke)
    course = CPU if found.smoke or find_device(None).platform == "cpu" else ACCELERATED
    if found.most_rows is not None:
        course = replace(course, decodes=tuple(one for one in course.decodes if one[0] <= found.most_rows))
    runner = models.run(subject, course.engine, found.layout)
    conditions = card.show_card(subject, runner.plan.cache, measure(probes)) | {"layout": layout_of(runner.params)}
    runner.warmup(progress=True)
    peers, notes = find_peers(subject, runner.device)
    for peer, note in notes.items():
        print(f"no columns for {peer}: {note}")
    rows = [_run(race, probes, found.rounds) for race in _races(course, runner, peers)]
    _show(rows, list(peers))
    aims = [_judge(peer, name, aim, rows) for peer, named in course.aims.items() for name, aim in named.items()]
    floors = [_judge_floor(row, course.floors[row["row"]]) for row in rows if row["row"] in course.floors]
    farthest = max(rows, key=lambda row: row["ours_over_floor"])
    print(f"farthest from its floor: {farthest['row']}, at {farthest['ours_over_floor']:.2f} times it")
    if found.smoke:
        print("a smoke run: none of these figures means anything")
    card.finish(
        "compare", found, conditions, rows, aims=aims, floors=floors, notes=notes, farthest_from_floor=farthest["row"]
    )


def _races(course: Course, runner: ModelRunner, peers: Mapping[str, Peer]) -> Iterator[Race]:
    """Sets up one race after the other."""
    cfg, itemsize = runner.model_config, jnp.dtype(runner.plan.cache.dtype).itemsize

    def race(
        name: str,
        work: Work,
        ours: Contestant,
        theirs: dict[str, dict[str, Contestant]],
        most_rounds: int | None = None,
    ) -> Race:
        kinds = [(peer, kind) for peer, settings in theirs.items() for kind in settings]
        precisions = {f"{peer} {kind}": peers[peer].precision(kind) for peer, kind in kinds}
        return Race(name, work, ours, theirs, precisions, most_rounds)

    for rows, context in course.decodes:
        prompts = [models.prompt(cfg, context, seed=row) for row in range(rows)]
        theirs = {name: peer.decode(prompts, models.TOKEN, burst=BURST) for name, peer in peers.items()}
        work = decode_work(cfg, rows=rows, context=context, itemsize=itemsize)
        yield race(f"decode {rows} at {context}", work, _decode(runner, rows, context), theirs)
        runner.reset()
    for tokens in course.prefills:
        ids = models.prompt(cfg, tokens)
        ours = Contestant(lambda ids=ids: runner.prefill("a", ids)[None], runner.reset)
        theirs = {name: peer.prefill(ids) for name, peer in peers.items()}
        work = prefill_work(cfg, tokens=tokens, itemsize=itemsize)
        yield race(_prefill(tokens), work, ours, theirs, course.long_rounds if tokens == course.prefills[-1] else None)
        runner.reset()


def _decode(runner: ModelRunner, rows: int, context: int) -> Contestant:
    """One step of rows with one token each; the call gives `[V]` for each."""
    batch, restore = models.prefilled(runner, rows, context)
    return Contestant(lambda: runner.decode_batch(batch), restore, BURST)


def _run(race: Race, probes: Probes, rounds: int) -> dict[str, Any]:
    """Checks that all sides compute the same, then times them.

    A setting of less than the model's precision that strays too far is left out of its row, which says so.
    """
    differences, strayed = _differences(race)
    sides = {name: one for name, one in race.contestants.items() if name not in strayed}
    times = alternate(sides | probes.contestants, rounds=min(rounds, race.most_rounds or rounds))
    medians = ", ".join(f"{name} {timing.median:.1f} ms" for name, timing in times.items())
    print(f"{race.name}: {medians}", file=sys.stderr, flush=True)
    machine, ours = ceilings(probes, times), times["ours"]
    row: dict[str, Any] = {
        "row": race.name,
        "ours_ms": ours.median,
        "ours_p90_ms": ours.p90,
        "floor_ms": race.work.floor_ms(machine),
        "floor_limit": race.work.limit(machine),
        **place(race.work, machine),
        "ours_over_floor": ours.median / race.work.floor_ms(machine),
        # As the floor is: its rates are those of the fastest tenth of the probes' calls.
        "ours_p10_over_floor": ours.p10 / race.work.floor_ms(machine),
        "calls": ours.count,
        "strayed": strayed,
    }
    for peer, settings in race.theirs.items():
        kinds = [kind for kind in settings if f"{peer} {kind}" not in strayed]
        worst = max(differences[f"{peer} {kind}"] for kind in kinds)
        row |= _columns(peer, {kind: times[f"{peer} {kind}"] for kind in kinds}, ours, worst)
    return row


def _columns(peer: str, kinds: Mapping[str, Timing], ours: Timing, difference: float) -> dict[str, Any]:
    """Returns one peer's columns, in the fastest of its settings."""
    best, prefix = min(kinds, key=lambda kind: kinds[kind].median), column(peer)
    return {
        f"{prefix}_ms": kinds[best].median,
        f"{prefix}_p90_ms": kinds[best].p90,
        f"{prefix}_setting": best,
        f"{prefix}_all_ms": {kind: timing.median for kind, timing in kinds.items()},
        f"{prefix}_over_ours": kinds[best].median / ours.median,
        f"{prefix}_logits_difference": difference,
    }


def column(peer: str) -> str:
    """Returns what the names of a peer's columns begin with."""
    return peer.replace(".", "_")


def _differences(race: Race) -> tuple[dict[str, float], dict[str, float]]:
    """Runs every side once; gives how far its logits are from ours at most, and those apart that strayed too far.

    Raises:
        RuntimeError: a side in float32 strayed, or every setting of a peer: that is not the same model.
    """
    found, largest = run_once(race.contestants, "ours")
    strayed = {name: far for name, far in found.items() if not far < AGREEMENT[race.precisions[name]] * largest}
    for name, far in strayed.items():
        print(f"{race.name}: logits of {name} differ by up to {far:.3g}, the largest is {largest:.3g}: left out")
    lost = [peer for peer, kinds in race.theirs.items() if all(f"{peer} {kind}" in strayed for kind in kinds)]
    if lost or any(race.precisions[name] == "float32" for name in strayed):
        raise RuntimeError(f"{race.name}: {', '.join(strayed)} run another model than ours")
    return {name: far for name, far in found.items() if name not in strayed}, strayed


def _show(rows: list[dict[str, Any]], peers: list[str]) -> None:
    lines = []
    for row in rows:
        cells = [row["row"], f"{row['ours_ms']:.1f}", f"{row['ours_p90_ms']:.1f}", f"{row['floor_ms']:.1f}"]
        lines.append([*cells, _ceiling(row), f"{row['ours_over_floor']:.2f}", f"{row['ours_p10_over_floor']:.2f}"])
    headings = ("row", "ours ms", "p90", "floor ms", "of", "ours / floor", "fastest tenth / floor")
    card.show_table(headings, lines, left=("row", "of"))
    for peer in peers:
        prefix, lines = column(peer), []
        for row in rows:
            cells = [
                row["row"],
                f"{row['ours_ms']:.1f}",
                f"{row[f'{prefix}_ms']:.1f}",
                f"{row[f'{prefix}_p90_ms']:.1f}",
            ]
            cells += [row[f"{prefix}_setting"], f"{row[f'{prefix}_over_ours']:.2f}"]
            lines.append([*cells, f"{row[f'{prefix}_logits_difference']:.1g}"])
        headings = "row", "ours ms", f"{peer} ms", "p90", "fastest setting", f"{peer} / ours", "logits differ by"
        card.show_table(headings, lines, left=("row", "fastest setting"))


def _ceiling(row: dict[str, Any]) -> str:
    if row["floor_limit"] == "reading":
        return f"reading, {row['read_rate'] / 1e9:.0f} GB/s"
    return f"products, {row['product_rate'] / 1e9:.0f} GFLOP/s"


def _judge(peer: str, name: str, aim: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints whether one row reached its aim, and gives that back."""
    ratio = next((row.get(f"{column(peer)}_over_ours") for row in rows if row["row"] == name), None)
    reached = None if ratio is None else ratio >= aim
    verdict = "not measured" if ratio is None else f"{_verdict(bool(reached))} with {ratio:.2f}"
    print(f"aim: {name} at least {aim:.3g} times as fast as {peer}: {verdict}")
    return {"peer": peer, "row": name, "aim": aim, "ratio": ratio, "reached": reached}


def _judge_floor(row: dict[str, Any], aim: float) -> dict[str, Any]:
    """Prints how much of the machine's ceiling one row reached, and gives that back."""
    share = 1 / row["ours_over_floor"]
    print(f"aim: {row['row']} at least {aim:.0%} of the machine's ceiling: {_verdict(share >= aim)} with {share:.0%}")
    return {"row": row["row"], "aim": aim, "share": share, "reached": share >= aim}


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


if __name__ == "__main__":
    main()
