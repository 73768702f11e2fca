"""What do the records under bench/results look like?

Reads every JSON file there and draws, for each machine and model (what follows the benchmark's name in a file's name):
the decode steps and prompts of `decode` and `prefill` under the machine's two ceilings; the time of a step against
batch and context, with its floor, from `scaling`; the sides of `compare` beside each other; and the weak scaling that
`plan` predicts. `--smoke` draws from
smoke runs, which it makes first unless `--results` says where some are, into a temporary folder. Needs the extra
`bench`.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import card

RESULTS, IMAGES = Path("bench/results"), Path("docs/images")
SOURCES = ("decode", "prefill", "scaling", "compare", "plan")  # benchmarks that are drawn
INK, OURS, FLOOR = "#222222", "#0072b2", "#999999"
THEIRS = {"transformers": "#e69f00", "llama_cpp": "#009e73"}
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "figure.facecolor": "white",  # legible on a dark page, too
    "savefig.facecolor": "white",
    "legend.frameon": False,
    "svg.hashsalt": "ferrum_jax",  # the same record gives the same file
}

Rows = list[dict[str, Any]]
Records = dict[str, dict[str, Any]]  # by benchmark


@dataclass(frozen=True)
class Drawing:
    """One kind of image."""

    name: str
    needs: tuple[str, ...]  # benchmarks
    draw: Callable[[Records], Figure]


def main() -> None:
    """Draws whatever there are records for and prints the JSON line."""
    parser = card.parser(__doc__)
    parser.add_argument("--results", type=Path, help=f"folder of JSON files [{RESULTS}]")
    parser.add_argument("--images", type=Path, help=f"folder to write to [{IMAGES}]")
    parser.add_argument("--format", choices=("svg", "png"), default="svg", help="[svg]")
    parser.add_argument("--smoke", action="store_true", help="draw tiny runs: shows that it runs")
    parser.add_argument("--json", type=card.record, metavar="PATH", help="write the JSON object there as well")
    found = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = found.results or (_run_smoke(Path(folder)) if found.smoke else RESULTS)
        images = found.images or (Path(folder) if found.smoke else IMAGES)
        written = draw_all(read(results), images, found.format)
    for path in written:
        print(path)
    card.finish("plot", found, {}, [{"image": path.name} for path in written])


def read(folder: Path) -> dict[str, Records]:
    """Reads the records that are drawn, by what follows the benchmark's name in a file's name."""
    found: dict[str, Records] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["benchmark"] in SOURCES:
            setting = path.stem.removeprefix(record["benchmark"]).strip("-")
            found.setdefault(setting, {})[record["benchmark"]] = record
    return found


def draw_all(records: dict[str, Records], folder: Path, kind: str) -> list[Path]:
    """Writes every image that there are records for; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context(STYLE):
        for setting, found in records.items():
            for drawing in DRAWINGS:
                if all(name in found for name in drawing.needs):
                    path = folder / f"{'-'.join(filter(None, (drawing.name, setting)))}.{kind}"
                    metadata = {"Date": None} if kind == "svg" else None
                    drawing.draw(found).savefig(path, dpi=150, metadata=metadata)
                    written.append(path)
    return written


def _run_smoke(folder: Path) -> Path:
    for name in SOURCES:
        command = [sys.executable, "-m", f"bench.{name}", "--smoke", "--rounds", "1", "--json", str(folder / name)]
        command[-1] += ".json"
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def _roofline(records: Records) -> Figure:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = records["decode"]["rows"] + records["prefill"]["rows"]
    product_rate, read_rate = (float(np.median([row[rate] for row in rows])) for rate in ("product_rate", "read_rate"))
    at = np.array([_intensity(row) for row in rows])
    wide = np.geomspace(at.min() / 2, max(at.max(), product_rate / read_rate) * 2, 200)
    axes.plot(wide, np.minimum(product_rate, read_rate * wide) / 1e9, color=FLOOR, linewidth=2)
    axes.annotate(f"{product_rate / 1e9:,.0f} GFLOP/s", (wide[-1], product_rate / 1e9), (0, 5), ha="right", **_OFFSET)
    axes.annotate(
        f"{read_rate / 1e9:,.0f} GB/s", (wide[60], wide[60] * read_rate / 1e9), (-6, 6), ha="right", **_OFFSET
    )
    for name, color, marker in (("decode", OURS, "o"), ("prefill", THEIRS["transformers"], "s")):
        mine = records[name]["rows"]
        rates = [row["operations"] / row["call_ms"] / 1e6 for row in mine]
        axes.scatter(list(map(_intensity, mine)), rates, color=color, marker=marker, label=name, zorder=3)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte that must be read", ylabel="GFLOP/s")
    axes.legend(loc="lower right")
    return _titled(figure, "Steps under the machine's ceilings", records["decode"])


_OFFSET: dict[str, Any] = {"textcoords": "offset points", "color": INK, "fontsize": 9}


def _intensity(row: dict[str, Any]) -> float:
    return row["operations"] / row["num_bytes"]


def _scaling(records: Records) -> Figure:
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = records["scaling"]["rows"]
    by_batch = [row for row in rows if row["sweep"] == "batch"]
    by_context = [row for row in rows if row["sweep"] == "context"]
    _sweep(left, by_batch, "rows", f"rows, each at context {by_batch[0]['context']}")
    _sweep(right, by_context, "context", "context of one row, positions")
    left.set_ylabel("milliseconds a step")
    left.legend(loc="upper left")
    return _titled(figure, "Time of a decode step", records["scaling"])


def _sweep(axes: Axes, rows: Rows, key: str, label: str) -> None:
    at = [row[key] for row in rows]
    axes.plot(at, [row["call_ms"] for row in rows], color=OURS, marker="o", label="median")
    axes.plot(at, [row["call_p90_ms"] for row in rows], color=OURS, linestyle=":", label="90th percentile")
    axes.plot(at, [row["floor_ms"] for row in rows], color=FLOOR, linestyle="--", linewidth=2, label="floor")
    axes.set(xlabel=label, xlim=(0, None), ylim=(0, None))


def _peers(records: Records) -> Figure:
    rows = records["compare"]["rows"]
    sides = {"ours": OURS} | {name: color for name, color in THEIRS.items() if f"{name}_ms" in rows[0]}
    figure = Figure(figsize=(8.5, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(sides)
    for index, (side, color) in enumerate(sides.items()):
        places = np.arange(len(rows)) + (index - (len(sides) - 1) / 2) * width
        values = [row[f"{side}_ms"] / row["ours_ms"] for row in rows]
        bars = axes.bar(places, values, width * 0.92, color=color, label=side.replace("_", "."))
        axes.bar_label(bars, [f"{row[f'{side}_ms']:.0f}" for row in rows], fontsize=9, padding=2)
    floors = [row["floor_ms"] / row["ours_ms"] for row in rows]
    groups = np.arange(len(rows))
    axes.hlines(floors, groups - 0.42, groups + 0.42, color=INK, linewidth=1.5, linestyle=(0, (4, 2)), label="floor")
    axes.set_xticks(groups, [row["row"].replace(" at ", "\nat ") for row in rows])
    axes.set_ylabel("time relative to ours (labels: ms)")
    axes.margins(y=0.12)
    axes.grid(visible=False, axis="x")
    axes.legend(loc="upper right", ncols=len(sides) + 1, bbox_to_anchor=(1, 1.13), fontsize=9)
    return _titled(figure, "Beside other engines, less is better", records["compare"])


def _weak_scaling(records: Records) -> Figure:
    rows = records["plan"]["scaling"]
    most = max(row["rows_per_device"] for row in rows)
    rows = [row for row in rows if row["rows_per_device"] == most]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for device, color in zip(sorted({row["device"] for row in rows}), (OURS, *THEIRS.values()), strict=False):
        for widest, style in zip(sorted({row["widest"] for row in rows}), ("-", "--"), strict=False):
            mine = [row for row in rows if (row["device"], row["widest"]) == (device, widest)]
            at, label = [row["devices"] for row in mine], f"{device}, one replica on up to {widest}"
            drawn = {"color": color, "linestyle": style, "marker": "o", "label": label}
            left.plot(at, [row["tokens_per_second"] for row in mine], **drawn)
            right.plot(at, [100 * row["efficiency"] for row in mine], **drawn)
    left.set(xscale="log", yscale="log", xlabel="devices", ylabel="tokens/s at most")
    right.set(xscale="log", xlabel="devices", ylabel="% of the devices' time not lost", ylim=(0, 105))
    for axes in (left, right):
        axes.set_xticks(counts := sorted({row["devices"] for row in rows}), [str(count) for count in counts])
        axes.minorticks_off()
    left.legend(loc="upper left", fontsize=9)
    figure.suptitle("Predicted weak scaling of a decode step\n", x=0.01, ha="left", fontsize=13, color=INK)
    told = f"{rows[0]['model']}, {most} sequences a device; predicted, not measured"
    figure.text(
        0.01, 0.925, told + (" (smoke run)" if records["plan"]["smoke"] else ""), fontsize=9, color="#555555", va="top"
    )
    return figure


def _titled(figure: Figure, title: str, record: dict[str, Any]) -> Figure:
    """Writes above a figure what it shows, and the conditions of the record."""
    conditions = record["card"]
    platform, _, kind = conditions["device"].partition(" ")  # as "gpu NVIDIA H200"
    machine = f"{conditions['cores']} cores of {conditions['processor']}" if platform == "cpu" else kind
    told = f"{conditions['model']}, {conditions['dtype']}, {machine}"
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=13, color=INK)
    figure.text(0.01, 0.925, told + (" (smoke run)" if record["smoke"] else ""), fontsize=9, color="#555555", va="top")
    return figure


DRAWINGS = (
    Drawing("roofline", ("decode", "prefill"), _roofline),
    Drawing("scaling", ("scaling",), _scaling),
    Drawing("peers", ("compare",), _peers),
    Drawing("weak-scaling", ("plan",), _weak_scaling),
)


if __name__ == "__main__":
    main()
