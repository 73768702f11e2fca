"""What does a decode step of 8 rows cost when 5 adapters and 3 bare rows are mixed in it, beside one of bare rows?

The contract's `decode_batch` at a context of 256. The adapters are random, of rank 8, on all seven projections.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bench import card, models
from bench.setting import start
from bench.timing import Contestant, alternate
from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.contract.slots import ActiveLoraAdapter
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.models import adapters

RANK = 8
ROWS = 8
ADAPTERS = 5  # the other rows are bare
CONTEXT, SMOKE_CONTEXT = 256, 32  # positions
ENGINE = EngineConfig(
    max_seqs=2 * ROWS,
    kv_capacity=512,
    max_loras=ADAPTERS,
    max_lora_rank=RANK,
    decode_rows=(ROWS,),
    chunk_rows=(1,),
    chunk_tokens=(256,),
    verify_tokens=(16,),
)
SMOKE_ENGINE = replace(ENGINE, kv_capacity=64, chunk_tokens=(32,))


def main() -> None:
    """Times both batches in turn and prints the table and the JSON line."""
    setting = start(__doc__, ENGINE, SMOKE_ENGINE)
    found, runner = setting.found, setting.runner
    with tempfile.TemporaryDirectory() as folder:
        row = _measure(runner, Path(folder), SMOKE_CONTEXT if found.smoke else CONTEXT, found.rounds)
    cells = [f"{ROWS}", f"{ADAPTERS}", f"{RANK}", f"{row['bare_ms']:.1f}", f"{row['mixed_ms']:.1f}"]
    headings = "rows", "adapters", "rank", "bare ms", "mixed ms", "mixed / bare"
    card.show_table(headings, [[*cells, f"{row['ratio']:.2f}"]])
    setting.finish("adapters", [row])


def write_adapter(folder: Path, cfg: ModelConfig, seed: int) -> Path:
    """Writes a random adapter of every projection in PEFT's format."""
    draw = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in adapters.projections(cfg).items():
        out_size, in_size = weight.shape
        for half, shape in (("A", (RANK, in_size)), ("B", (out_size, RANK))):
            values = draw.normal(scale=0.02, size=shape).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(adapters.PROJECTIONS)}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _measure(runner: ModelRunner, folder: Path, context: int, rounds: int) -> dict[str, Any]:
    ids = models.prompt(runner.model_config, context)
    for at in range(ADAPTERS):
        path = write_adapter(folder / f"adapter-{at}", runner.model_config, at)
        runner.set_lora_adapter_for_cache(f"mixed-{at}", ActiveLoraAdapter(name=f"adapter-{at}", path=str(path)))
    for kind in ("bare", "mixed"):
        for at in range(ROWS):
            runner.prefill(f"{kind}-{at}", ids)

    def contestant(kind: str) -> Contestant:
        batch = [(f"{kind}-{at}", models.TOKEN, context) for at in range(ROWS)]

        def go_back() -> None:
            for cache_id, _, _ in batch:
                runner.truncate_kv(cache_id, context)

        return Contestant(lambda: runner.decode_batch(batch), go_back, burst=4)

    times = alternate({kind: contestant(kind) for kind in ("bare", "mixed")}, rounds=rounds, pause=0.0)
    return {
        "rows": ROWS,
        "adapters": ADAPTERS,
        "rank": RANK,
        "bare_ms": times["bare"].median,
        "mixed_ms": times["mixed"].median,
        "mixed_p90_ms": times["mixed"].p90,
        "ratio": times["mixed"].median / times["bare"].median,
    }


if __name__ == "__main__":
    main()
