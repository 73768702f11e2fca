"""How much memory does each process take that loads its share of a checkpoint?

A checkpoint of random weights in bfloat16, in shards of safetensors and then as Orbax, is loaded on a mesh of four
devices by two processes with two devices each. Each says the most memory that it held of its own while it loaded,
beside what it held before, and by how much that is more than its share of the parameters and the largest tensor. Pages
of files that the kernel keeps, and may drop at any time, do not count.

`--gigabytes` says how large the checkpoint is; so much is written to a temporary folder, twice.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from rich.progress import track
from safetensors.numpy import save_file

import ferrum_jax
from bench import card, models
from ferrum_jax.config import ModelConfig
from ferrum_jax.models import family
from ferrum_jax.models.specs import ParamSpec, named_leaves, num_bytes

PROCESSES, DEVICES = 2, 2  # and devices of each
MOST = 500e6  # bytes beyond a share and the largest tensor
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
CHILD = """
import json, sys, threading
import jax
path, devices, settings = json.loads(sys.argv[1])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", devices)
import ferrum_jax
def held():
    with open("/proc/self/status") as status:
        found = [line.split()[1] for line in status if line.startswith(("RssAnon", "RssShmem"))]
    return 1024 * sum(map(int, found))
most, is_done = held(), threading.Event()
told = {"before": most}
def watch():
    global most
    while not is_done.wait(0.002):
        most = max(most, held())
watcher = threading.Thread(target=watch)
watcher.start()
try:
    runner = ferrum_jax.load(path, artifacts=False, progress=False, **settings)
    leaves = jax.tree.leaves(runner._device.params)
    told["share"] = sum(part.data.nbytes for leaf in leaves for part in leaf.addressable_shards)
    runner.close()
finally:
    is_done.set()
    watcher.join()
    print(json.dumps(told | {"most": most}), flush=True)
"""


def main() -> None:
    """Writes both checkpoints, has them loaded, and prints the table, the aim and the JSON line."""
    found = card.options(__doc__, timed=False, more=_more)
    if found.model is not None:
        raise SystemExit(f"the checkpoint is of random weights, --model {found.model} contradicts that")
    jax.config.update("jax_platforms", "cpu")  # as in the processes that load
    shape, layers = CONFIG | (SMALL if found.smoke else {}), 2
    if not found.smoke:
        one, two = (_bytes(shape | {"num_hidden_layers": count}) for count in (1, 2))
        layers = max(1, round((found.gigabytes * 1e9 - one) / (two - one)) + 1)
    config = shape | {"num_hidden_layers": layers}
    cfg = ModelConfig.from_hf(config)
    specs = family(cfg).param_specs(cfg)
    size = num_bytes(specs, "bfloat16")
    named = models.Subject(f"llama of {layers} layers, {size / 1e9:.2f} GB on disk", {}, cfg, "bfloat16")
    conditions = card.show_card(named) | {"weight_bytes": size}
    largest = max(num_bytes({name: spec}, "bfloat16") for name, spec in named_leaves(specs).items())
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, orbax = Path(scratch, "folder"), Path(scratch, "orbax")
        _write(folder, config, specs)
        ferrum_jax.convert(folder, orbax, dtype="bfloat16", progress=True)
        for kind, path in (("safetensors", folder), ("orbax", orbax)):
            told = _load(path)
            for process, one in enumerate(told):
                share = told[0]["share"]  # of process 0: all processes have as many devices
                beyond = one["most"] - share - largest
                rows.append({"checkpoint": kind, "process": process, "share": share, "largest": largest}
                            | one | {"beyond": beyond})  # fmt: skip
    headings = "checkpoint", "process", "share, MB", "largest, MB", "before, MB", "most, MB", "beyond, MB"
    shown = [
        [
            row["checkpoint"],
            str(row["process"]),
            *(f"{row[name.partition(',')[0]] / 1e6:,.0f}" for name in headings[2:]),
        ]
        for row in rows
    ]
    card.show_table(headings, shown, left=("checkpoint",))
    worst = max(row["beyond"] for row in rows)
    verdict = "reached" if worst <= MOST else "missed"
    print(
        f"aim: at most {MOST / 1e6:.0f} MB beyond the share and the largest tensor: {verdict} with {worst / 1e6:,.0f}"
    )
    aims = [{"name": "bytes beyond", "aim": MOST, "found": worst}]
    card.finish("shares", found, conditions, rows, aims=aims, checkpoint_bytes=size)


def _more(reader: argparse.ArgumentParser) -> None:
    reader.add_argument("--gigabytes", type=card.above_zero, default=4.0, help="of the checkpoint [4]")


def _bytes(config: dict[str, Any]) -> int:
    cfg = ModelConfig.from_hf(config)
    return num_bytes(family(cfg).param_specs(cfg), "bfloat16")


def _write(folder: Path, config: dict[str, Any], specs: Any) -> None:
    """Writes a folder with one shard for each layer, and one for the rest."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shards: dict[str, dict[str, ParamSpec]] = {}
    for name, spec in named_leaves(specs).items():
        part = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        shards.setdefault(f"model-{part}.safetensors", {})[name] = spec
    rng = np.random.default_rng(5)
    for shard, own in track(shards.items(), "writing", disable=not sys.stderr.isatty()):
        drawn = {name: rng.standard_normal(spec.shape, np.float32) * np.float32(0.02) for name, spec in own.items()}
        save_file({name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in drawn.items()}, folder / shard)
    weight_map = {name: shard for shard, own in shards.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def _load(path: Path) -> list[dict[str, int]]:
    """Has a checkpoint loaded by all processes; returns what each says."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"mesh": {"model": PROCESSES * DEVICES}, "dtype": "bfloat16", "max_seqs": 1, "kv_capacity": 64}
    variables = os.environ | {"FERRUM_COORDINATOR": f"127.0.0.1:{port}", "FERRUM_NUM_PROCESSES": str(PROCESSES)}
    command = [sys.executable, "-c", CHILD, json.dumps([str(path), DEVICES, settings])]
    running = [
        subprocess.Popen(
            command, env=variables | {"FERRUM_PROCESS_ID": str(index)}, cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(PROCESSES)
    ]  # fmt: skip
    told = []
    for process in running:
        said, problem = process.communicate()
        if process.returncode:
            raise RuntimeError(f"a process failed: {problem[-2000:]}")
        told.append(json.loads(said.splitlines()[-1]))
    return told


if __name__ == "__main__":
    main()
