"""Tables of the documents say what the records under bench/results say."""

import json
import re
from typing import Any

import pytest

from tests.bench.smoke import ROOT

PEERS = ("transformers_ms", "transformers_over_ours", "llama_cpp_ms", "llama_cpp_over_ours")
FIGURES = ("ours_ms", *PEERS)
WITH_AIMS = ("ours_ms", "ours_over_floor", "aim", *PEERS[:2], "aim", *PEERS[2:], "aim")  # each of the field before it
TABLES = [  # document, heading, the record under bench/results, its field in each column
    ("README.md", "### An AMD EPYC of family 26 with AVX-512", "compare-smollm2-zen5.json", FIGURES),
    ("docs/benchmarks.md", "### Intel Xeon, AVX-512", "compare-smollm2-avx512.json", WITH_AIMS),
    ("docs/benchmarks.md", "### AMD EPYC, AVX-512", "compare-smollm2-zen4.json", WITH_AIMS),
    ("docs/benchmarks.md", "### A newer AMD EPYC, AVX-512", "compare-smollm2-zen5.json", WITH_AIMS),
    ("docs/benchmarks.md", "### AMD EPYC, AVX2", "compare-smollm2-cpu.json", WITH_AIMS),
    ("docs/benchmarks.md", "### Llama 3.1 8B", "compare-llama-3.1-8b-h200.json", WITH_AIMS[:6]),
]


def _table(text: str, heading: str) -> list[list[str]]:
    """Cells of the rows of the first table under a heading, without emphasis."""
    section = re.split(r"^##", text.partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    table = re.search(r"^\|.*\n\|[-|]+\|\n((?:\|.*\n)+)", section, flags=re.MULTILINE)
    assert table is not None, f"no table under {heading!r}"
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def _name(cell: str) -> str:
    """The record's name of a row: `decode, batch 1, context 256` and `prefill of 128` are the README's."""
    return re.sub(r"^decode, batch (\d+), context (\d+)$", r"decode \1 at \2", cell).replace("prefill of ", "prefill ")


def _faults(cells: list[str], fields: tuple[str, ...], row: dict[str, Any]) -> list[str]:
    """What a row of a table says and the record does not; a figure has as many decimals as the table gives it."""
    faults, value = [], 0.0
    for at, (cell, field) in enumerate(zip(cells, fields, strict=True)):
        if field == "aim":
            if cell:
                aim, verdict = cell.split()
                reached = value <= float(aim) if fields[at - 1] == "ours_over_floor" else value >= float(aim)
                if verdict != ("reached" if reached else "missed"):
                    faults.append(f"aim {cell}, the record's {fields[at - 1]} is {value:.3f}")
            continue
        value, number = row[field], cell.removesuffix(" ms").removesuffix("\N{MULTIPLICATION SIGN}")
        recorded = f"{value:,.{len(number.partition('.')[2])}f}"
        if number != recorded:
            faults.append(f"{field} {number}, the record has {recorded}")
    return faults


@pytest.mark.parametrize(("document", "heading", "record", "fields"), TABLES)
def test_a_table_of_speed_says_what_the_record_says(document: str, heading: str, record: str, fields: tuple[str, ...]):
    rows = json.loads((ROOT / "bench/results" / record).read_text(encoding="utf-8"))["rows"]
    recorded = {row["row"]: row for row in rows}
    table = _table((ROOT / document).read_text(encoding="utf-8"), heading)
    assert {_name(first) for first, *_ in table} == recorded.keys()
    wrong = [f"{first}: {fault}" for first, *cells in table for fault in _faults(cells, fields, recorded[_name(first)])]
    assert not wrong, "\n".join(wrong)
