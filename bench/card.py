"""What every benchmark prints around its table: options, a static card before, one JSON line after."""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from bench.machine import Machine
from bench.models import Subject
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.planning.subject import CONFIGURATIONS

PACKAGES = ("ferrum-jax", "jax", "jaxlib", "torch", "transformers", "llama-cpp-python")
WIDTH = 150  # columns, where the output is no terminal


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is a benchmark's docstring."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def above_zero(text: str) -> float:
    """Reads the value of an option, a number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def at_least_one(text: str) -> int:
    """Reads the value of an option, a count of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def record(text: str) -> Path:
    """Reads the value of an option, the path of a file in a folder that is there."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a file's path in a folder that is there")
    return path


def options(
    description: str | None,
    *,
    timed: bool = True,
    rounds: int = 12,
    more: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.Namespace:
    """Reads the options that all benchmarks share, and those that `more` adds.

    `timed` ones have `--rounds`, too, which is `rounds` unless it is given.
    """
    reader = parser(description)
    named = ", ".join(CONFIGURATIONS)
    reader.add_argument(
        "--model",
        help=f"folder, .gguf file, Hugging Face id, or random weights as {named} [SmolLM2-135M-Instruct]",
    )
    if more is not None:
        more(reader)
    if timed:
        reader.add_argument("--rounds", type=at_least_one, help=f"turns of each contestant that count [{rounds}]")
    reader.add_argument("--smoke", action="store_true", help="a tiny random model and two rounds: shows that it runs")
    reader.add_argument("--json", type=record, metavar="PATH", help="write the JSON object there as well")
    found = reader.parse_args()
    if found.smoke and found.model is not None:
        reader.error(f"--smoke takes its own model, --model {found.model} contradicts it")
    if timed and found.rounds is None:
        found.rounds = 2 if found.smoke else rounds
    return found


def show_card(subject: Subject, cache: CacheSpec | None = None, machine: Machine | None = None) -> dict[str, Any]:
    """Prints the conditions of a run and gives them back, by name and unit."""
    device = jax.local_devices()[0]
    card: dict[str, Any] = {
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{device.platform} {device.device_kind}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": {"python": platform.python_version()} | _versions(),
        "model": subject.name,
        "dtype": subject.dtype,
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(subject.params)),
    }
    if cache is not None:
        card |= {"kv_bytes_per_position": cache.bytes_per_position, "kv_bytes": cache.num_bytes}
    if machine is not None:
        card |= {name: round(value) for name, value in asdict(machine).items()}
    table = Table(show_header=False, box=None)
    for name, text in _described(card).items():
        table.add_row(f"[bold]{name}[/bold]", text)
    console().print(table, highlight=False)
    return card


def together(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the conditions of a run of several models: the first one's, with a list where the models differ."""
    own = ("model", "dtype", "weight_bytes", "kv_bytes_per_position", "kv_bytes")
    found = {name: [card[name] for card in cards] for name in own if name in cards[0]}
    return cards[0] | {name: values for name, values in found.items() if any(one != values[0] for one in values)}


def _described(card: dict[str, Any]) -> dict[str, str]:
    texts = {
        "commit": f"{card['commit'] or 'no repository'}, {card['date']}",
        "device": f"{card['device']}, {card['processor']}, {card['cores']} cores, load average {card['load_average']}",
        "versions": ", ".join(f"{name} {version}" for name, version in card["versions"].items()),
        "model": f"{card['model']} in {card['dtype']}, {card['weight_bytes'] / 1e6:,.1f} MB of weights",
    }
    if "kv_bytes" in card:
        texts["KV"] = f"{card['kv_bytes_per_position']:,} bytes a position, {card['kv_bytes'] / 1e6:,.1f} MB in all"
    if "product_rate" in card:
        texts["ceiling"] = (
            f"matrix products {card['product_rate'] / 1e9:,.1f} GFLOP/s, reading {card['read_rate'] / 1e9:,.1f} GB/s"
        )
    return texts


def console() -> Console:
    """Standard output, wide enough for a table where it is a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def show_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = ()) -> None:
    """Prints a table of numbers; the columns under the headings in `left` are words."""
    table = Table(box=None, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(*row)
    console().print(table, highlight=False)


def finish(name: str, found: argparse.Namespace, card: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> None:
    """Prints the result as one line of JSON, the last one, and writes it to `--json` if asked."""
    line = json.dumps({"benchmark": name, "smoke": found.smoke, "card": card, "rows": rows, **more})
    print(line, flush=True)
    if found.json is not None:
        found.json.write_text(line + "\n", encoding="utf-8")


def _commit() -> str | None:
    """Names the commit that is measured, with a plus sign where files differ from it; None outside a repository."""
    folder = Path(__file__).parent
    try:
        done = [
            subprocess.run(["git", *command.split()], cwd=folder, capture_output=True, text=True, check=True)
            for command in ("rev-parse --short HEAD", "status --porcelain --untracked-files=no")
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    head, changes = (one.stdout.strip() for one in done)
    return head + "+" * bool(changes)


def _versions() -> dict[str, str]:
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # torch and transformers come with the extra `reference`
    return installed


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
