"""What does a decode step of 8 rows cost when adapters are mixed in it, beside one of bare rows?

The contract's `decode_batch` at a context of 256, for 5 adapters of rank 8 with 3 bare rows among them, and for 8
adapters of rank 8 and of rank 64. The adapters are random, on all seven projections; each case has an engine whose
stacks are just as large (`max_loras`, `max_lora_rank`).
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bench import card, models
from bench.timing import Contestant, alternate
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.models import adapters

ROWS = 8
CASES = ((5, 8), (8, 8), (8, 64))  # adapters, rank; the other rows are bare
CONTEXT, SMOKE_CONTEXT = 256, 32  # positions
ENGINE = EngineConfig(
    max_seqs=2 * ROWS,
    kv_capacity=512,
    decode_rows=(ROWS,),
    query_blocks=(1,),
    block_tokens=256,
    verify_tokens=16,
)
SMOKE_ENGINE = replace(ENGINE, kv_capacity=64, block_tokens=32)


def main() -> None:
    """Times both batches of every case in turn and prints the table and the JSON line."""
    found = card.options(__doc__)
    subject = models.read(found)
    context = SMOKE_CONTEXT if found.smoke else CONTEXT
    conditions: dict[str, Any] = {}
    rows = []
    for count, rank in CASES[:1] if found.smoke else CASES:
        engine = replace(SMOKE_ENGINE if found.smoke else ENGINE, max_loras=count, max_lora_rank=rank)
        runner = models.run(subject, engine)
        conditions = conditions or card.show_card(subject, runner.plan.cache)
        runner.warmup(progress=True)
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_measure(runner, Path(folder), count, rank, context, found.rounds))
        runner.close()
    _show(rows)
    card.finish("adapters", found, conditions, rows)


def write_adapter(folder: Path, cfg: ModelConfig, rank: int, seed: int) -> Path:
    """Writes a random adapter of every projection in PEFT's format."""
    draw = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in adapters.projections(cfg).items():
        out_size, in_size = weight.shape
        for half, shape in (("A", (rank, in_size)), ("B", (out_size, rank))):
            values = draw.normal(scale=0.02, size=shape).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(adapters.PROJECTIONS)}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _measure(runner: ModelRunner, folder: Path, count: int, rank: int, context: int, rounds: int) -> dict[str, Any]:
    ids = models.prompt(runner.model_config, context)
    for at in range(count):
        path = write_adapter(folder / f"adapter-{at}", runner.model_config, rank, at)
        runner.set_lora_adapter_for_cache(f"mixed-{at}", ActiveLoraAdapter(name=f"adapter-{at}", path=str(path)))
    for kind in ("bare", "mixed"):
        for at in range(ROWS):
            runner.prefill(f"{kind}-{at}", ids)

    def contestant(kind: str) -> Contestant:
        batch, restore = models.decodes(runner, [f"{kind}-{at}" for at in range(ROWS)], context)
        return Contestant(lambda: runner.decode_batch(batch), restore, burst=4)

    times = alternate({kind: contestant(kind) for kind in ("bare", "mixed")}, rounds=rounds, pause=0.0)
    return {
        "rows": ROWS,
        "adapters": count,
        "rank": rank,
        "bare_ms": times["bare"].median,
        "bare_p90_ms": times["bare"].p90,
        "mixed_ms": times["mixed"].median,
        "mixed_p90_ms": times["mixed"].p90,
        "ratio": times["mixed"].median / times["bare"].median,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        cells = [f"{row['rows']}", f"{row['adapters']}", f"{row['rank']}"]
        cells += [f"{row[key]:.1f}" for key in ("bare_ms", "bare_p90_ms", "mixed_ms", "mixed_p90_ms")]
        lines.append([*cells, f"{row['ratio']:.2f}"])
    card.show_table(("rows", "adapters", "rank", "bare ms", "p90", "mixed ms", "p90", "mixed / bare"), lines)


if __name__ == "__main__":
    main()
