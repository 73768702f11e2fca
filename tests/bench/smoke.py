"""How a test runs a benchmark on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CARD = {"commit", "date", "device", "processor", "cores", "load_average", "versions", "model", "dtype", "weight_bytes",
        "kv_bytes_per_position", "kv_bytes"}  # fmt: skip
CEILING = {"product_rate", "read_rate"}
PLACE = {"operations", "num_bytes"} | CEILING


def smoke(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """Runs a benchmark and gives its last line, which must be what it wrote to `--json`."""
    path = folder / f"{name}.json"
    command = [sys.executable, "-m", f"bench.{name}", "--smoke", "--json", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert path.read_text(encoding="utf-8") == line + "\n"
    result = json.loads(line)
    assert (result["benchmark"], result["smoke"]) == (name, True)
    return result
