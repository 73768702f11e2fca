"""What do weights in few bits make of a decode step and of a prompt, beside the weights in full?

The contract's `decode_batch` of 1 and of 8 rows and its `prefill` of 128 and 512 tokens, for the same model with its
matrices in int8, in fp8 and, where the checkpoint has quantised them itself, as they are there (`keep`); all take
turns, call by call. Beside them, on a CPU and where it is installed, llama.cpp over the same GGUF file and over the
model in Q8_0, each in the fastest of its settings. The floor reads the weights as they are kept, once. `agree` is the
share of a prompt's positions whose likeliest token is that of the weights in full: of random weights it says nothing.
Before a row is timed, the logits of what stands for the same numbers are compared with those of the weights in full:
`error` is the largest difference, of the largest logit. Beyond a limit the run ends. Kept weights may differ by sums
in another order, llama.cpp by its activations of 8 bits.
"""

import argparse
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench import card, gguf_copy, models
from bench.agreement import AGREEMENT, OURS, check_logits
from bench.floor import Work, step_work
from bench.llama_cpp_peer import LlamaCppPeer, quantise_file
from bench.machine import Probes, ceilings, make_probes, measure
from bench.models import TOKEN, Subject
from bench.peers import NEEDS
from bench.timing import Contestant, alternate
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.loading import load_params
from ferrum_jax.models import quantise
from ferrum_jax.models.quantisation import formats_of, specs_like
from ferrum_jax.planning.subject import CONFIGURATIONS
from ferrum_jax.sharding.devices import find_device
from ferrum_jax.weights import hub

PLAIN, KEEP = "in full", "keep"
SAME_FILE, EIGHT_BITS = "llama.cpp, the same file", "llama.cpp, Q8_0"
KEPT = ("int8", "float8_e4m3fn")
CONTEXT, PROMPTS = 256, (128, 512)  # positions, tokens
SMOKE_CONTEXT, SMOKE_PROMPTS = 16, (32,)
ROWS = (1, 8)
BURST = 4  # calls in a row
BLOCK_TOKENS = 64  # of a query block


def main() -> None:
    """Times all in turn and prints the table and the JSON line."""
    found = card.options(__doc__, more=_choose_weights)
    with tempfile.TemporaryDirectory() as folder:
        if found.file_type is not None:
            found.model = str(_write_random(found.model, found.file_type, Path(folder)))
        _compare(found)


def _compare(found: argparse.Namespace) -> None:
    context, lengths = (SMOKE_CONTEXT, SMOKE_PROMPTS) if found.smoke else (CONTEXT, PROMPTS)
    plain = models.read(found)
    probes = make_probes(plain.dtype, smoke=found.smoke)
    subjects = {name: _kept(plain, name) for name in (PLAIN, *KEPT) if name in (PLAIN, *found.weights)}
    subjects |= _as_stored(found, plain)
    runners = {name: models.run(subject, _engine(context, lengths)) for name, subject in subjects.items()}
    peers = _find_peers(found, plain)
    conditions = card.show_card(plain, runners[PLAIN].plan.cache, measure(probes))
    for runner in runners.values():
        runner.warmup(progress=True)
    agree = _agreement(runners, lengths[0])
    rows = []
    for count in ROWS:
        calls = {name: _decode(runner, count, context) for name, runner in runners.items()}
        prompts = [models.prompt(plain.config, context, seed=row) for row in range(count)]
        theirs = {name: peer.decode(prompts, TOKEN, burst=BURST) for name, peer in peers.items()}
        works = _works(subjects, [(context, 1)] * count)
        rows += _measure(f"decode {count}", calls, subjects, works, probes, found.rounds, theirs, peers)
        for runner in runners.values():
            runner.reset()
    for tokens in lengths:
        calls = {name: _prefill(runner, tokens) for name, runner in runners.items()}
        theirs = {name: peer.prefill(models.prompt(plain.config, tokens)) for name, peer in peers.items()}
        works = _works(subjects, [(0, tokens)])
        rows += _measure(f"prompt of {tokens}", calls, subjects, works, probes, found.rounds, theirs, peers)
    _show(rows, agree)
    card.finish("quantised", found, conditions, rows, agree=agree)


def _choose_weights(reader: argparse.ArgumentParser) -> None:
    known = (*KEPT, KEEP)
    reader.add_argument("--weights", nargs="+", choices=known, default=known, help="ways to keep them [all]")
    reader.add_argument(
        "--file-type",
        help="such as Q4_K_M: measure a file of this type, made by llama.cpp from --model's random weights",
    )


def _write_random(model: str, file_type: str, folder: Path) -> Path:
    """Writes a model with random weights as a GGUF file; its RoPE is not scaled, as the writer knows no scaling."""
    if model not in CONFIGURATIONS:
        raise SystemExit(f"--file-type takes a --model with random weights, {', '.join(CONFIGURATIONS)}, not {model}")
    cfg = replace(ModelConfig.from_hf(CONFIGURATIONS[model]), rope_scaling=None)
    gguf_copy.write(models.random(model, cfg, "float32"), folder / "full.gguf")
    path = folder / f"{model}.{file_type}.gguf"
    quantise_file(folder / "full.gguf", path, file_type)
    (folder / "full.gguf").unlink()
    return path


def _as_stored(found: argparse.Namespace, plain: Subject) -> dict[str, Subject]:
    """Reads the model again as its checkpoint keeps it, if that is in fewer bits."""
    path = _path_of(found)
    if path is None or KEEP not in found.weights:
        return {}
    params, _ = load_params(path, plain.dtype, quantize=KEEP)
    return {KEEP: replace(plain, params=params)} if formats_of(params) else {}


def _find_peers(found: argparse.Namespace, plain: Subject) -> dict[str, LlamaCppPeer]:
    path, platform = _path_of(found), find_device(None).platform
    missing = [package for package in NEEDS["llama.cpp"] if importlib.util.find_spec(package) is None]
    if path is None or path.suffix != ".gguf" or missing or (platform, plain.dtype) != ("cpu", "float32"):
        return {}
    peers = {SAME_FILE: LlamaCppPeer(plain, platform, path)}
    try:
        peers[EIGHT_BITS] = LlamaCppPeer(plain, platform, kept="Q8_0")
    except NotImplementedError as problem:
        print(f"without {EIGHT_BITS}: {problem}")
    return peers


def _path_of(found: argparse.Namespace) -> Path | None:
    """Where the model lies, unless it is a random one."""
    return None if found.smoke or found.model in CONFIGURATIONS else Path(hub.resolve(found.model))


def _engine(context: int, lengths: Sequence[int]) -> EngineConfig:
    longest, block = max(context, *lengths), min(*lengths, BLOCK_TOKENS)
    return EngineConfig(
        max_seqs=ROWS[-1],
        kv_capacity=2 * longest,
        decode_rows=ROWS,
        query_blocks=tuple(tokens // block for tokens in lengths),
        block_tokens=block,
    )


def _kept(plain: Subject, name: str) -> Subject:
    return plain if name == PLAIN else replace(plain, params=quantise(plain.params, plain.config, name))


def _works(subjects: Mapping[str, Subject], rows: Sequence[tuple[int, int]]) -> dict[str, Work]:
    """Returns each subject's work of a step, whose KV is of the dtype of the weights in full."""
    return {
        name: step_work(
            one.config, rows, itemsize=np.dtype(one.dtype).itemsize, specs=specs_like(one.params, one.config)
        )
        for name, one in subjects.items()
    }


def _agreement(runners: Mapping[str, ModelRunner], tokens: int) -> dict[str, float]:
    """Share of positions at which the likeliest token is that of the weights in full."""
    best = {}
    for name, runner in runners.items():
        ids = models.prompt(runner.model_config, tokens)
        best[name] = runner.forward_verify("agree", ids).argmax(axis=-1)
        runner.reset()
    return {name: float((ids == best[PLAIN]).mean()) for name, ids in best.items()}


def _decode(runner: ModelRunner, count: int, context: int) -> Contestant:
    batch, restore = models.prefilled(runner, count, context)
    return Contestant(lambda: runner.decode_batch(batch), restore, BURST)


def _prefill(runner: ModelRunner, tokens: int) -> Contestant:
    ids = models.prompt(runner.model_config, tokens)
    return Contestant(lambda: runner.prefill("prompt", ids), lambda: runner.release("prompt"))


def _measure(
    row: str,
    calls: Mapping[str, Contestant],
    subjects: Mapping[str, Subject],
    works: Mapping[str, Work],
    probes: Probes,
    rounds: int,
    theirs: Mapping[str, Mapping[str, Contestant]],
    peers: Mapping[str, LlamaCppPeer],
) -> list[dict[str, Any]]:
    kinds = {f"{peer} {kind}": one for peer, settings in theirs.items() for kind, one in settings.items()}
    limits = {f"{peer} {kind}": AGREEMENT[peers[peer].precision(kind)] for peer in theirs for kind in theirs[peer]}
    limits[KEEP] = OURS[subjects[PLAIN].dtype]
    alike = {name: one for name, one in {**calls, **kinds}.items() if name == PLAIN or name in limits}
    errors = check_logits(row, alike, PLAIN, limits)
    times = alternate({**calls, **kinds, **probes.contestants}, rounds=rounds)
    machine, first = ceilings(probes, times), times[PLAIN].median
    found = []
    for name, subject in subjects.items():
        floor = works[name].floor_ms(machine)
        found.append(
            {
                "row": row,
                "weights": name,
                "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(subject.params)),
                "call_ms": times[name].median,
                "call_p90_ms": times[name].p90,
                "over_plain": times[name].median / first,
                **({"relative_error": errors[name]} if name in errors else {}),
                "floor_ms": floor,
                "call_over_floor": times[name].median / floor,
                **{rate: round(value) for rate, value in asdict(machine).items()},
            }
        )
    for name, peer in peers.items():
        best = min(theirs[name], key=lambda kind: times[f"{name} {kind}"].median)
        timing = times[f"{name} {best}"]
        spent = {"call_ms": timing.median, "call_p90_ms": timing.p90, "over_plain": timing.median / first}
        checked = {"setting": best, "relative_error": max(errors[f"{name} {kind}"] for kind in theirs[name])}
        found.append({"row": row, "weights": name, "weight_bytes": peer.weight_bytes, **spent, **checked})
    return found


def _show(rows: list[dict[str, Any]], agree: Mapping[str, float]) -> None:
    lines = []
    for row in rows:
        cells = [row["row"], row["weights"], f"{row['weight_bytes'] / 1e6:.1f}"]
        cells += [f"{row[key]:.1f}" for key in ("call_ms", "call_p90_ms")]
        cells += [f"{row['over_plain']:.2f}"]
        cells += [f"{row['floor_ms']:.1f}", f"{row['call_over_floor']:.2f}"] if "floor_ms" in row else ["", ""]
        cells += [f"{row['relative_error']:.1g}" if "relative_error" in row else ""]
        lines.append([*cells, f"{agree[row['weights']]:.2f}" if row["weights"] in agree else ""])
    headings = ("row", "weights", "MB", "call ms", "p90", "over full", "floor ms", "over floor", "error", "agree")
    card.show_table(headings, lines, left=("row", "weights"))


if __name__ == "__main__":
    main()
