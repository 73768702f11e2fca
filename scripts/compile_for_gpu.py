"""What do steps become on a GPU? Compiles them for an H100 on a machine that has none.

Needs a JAX with the CUDA plugin (extra `cuda13`), no driver. Nothing runs, so nothing is tuned: products are Triton's
with default tiles, and times are not to be had. Kernels, temporary memory, copies of the KV and branches are:

    python scripts/compile_for_gpu.py --model llama-3.1-8b --layers 4 --rows 1 32 --blocks 16 --hlo /tmp/hlo
"""

import argparse
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin is loaded, its devices are not asked for

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh
from rich.console import Console
from rich.table import Table

from ferrum_jax.compile import sampler
from ferrum_jax.compile.sampler import SampleKey
from ferrum_jax.compile.step import ProgramContext
from ferrum_jax.config import LAYOUTS, EngineConfig, ModelConfig
from ferrum_jax.executor.sizing import plan_engine
from ferrum_jax.kvcache import state
from ferrum_jax.models import quantise
from ferrum_jax.models.backends import layout_for
from ferrum_jax.models.layout import lay_out
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import initialise
from ferrum_jax.planning.subject import CONFIGURATIONS

KIND = "NVIDIA H100 80GB HBM3"
H100 = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84929347584
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{KIND}"
"""  # CUDA's device properties, in the text form of XLA's `GpuTargetConfigProto`
KERNEL = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = .*? (?:fusion|custom-call|copy|sort|conditional|while|call)\(")


def main() -> None:
    """Compiles every program asked for, and prints what it consists of."""
    found = _options()
    one = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology="1x1x1")
    place = SingleDeviceSharding(one.devices[0])
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(device_kind=KIND, num_cores=132, platform="gpu"))
    cfg = ModelConfig.from_hf(CONFIGURATIONS[found.model] | {"num_hidden_layers": found.layers})
    engine = EngineConfig(
        max_seqs=max(found.rows), kv_capacity=found.capacity, decode_rows=tuple(sorted(found.rows)),
        query_blocks=tuple(sorted(found.blocks)),
    )  # fmt: skip
    plan = plan_engine(engine, cfg, platform="gpu", free_bytes=1 << 40)
    context = _context(cfg, plan, found, place)
    programs: list[Any] = [plan.buckets.decode(rows) for rows in found.rows]
    programs += [plan.buckets.blocks(count, mixed=False) for count in found.blocks]
    programs += [SampleKey(rows, way) for rows in found.rows for way in plan.buckets.sample_ways]
    table = Table(
        "program", "kernels", "branches and loops", "temporary MB", "aliased GB", "seconds", "most of them", box=None
    )
    for key in programs:
        started = time.perf_counter()
        with use_abstract_mesh(mesh):
            compiled = key.lower(context).compile()
        text, memory = compiled.as_text() or "", compiled.memory_analysis()
        assert memory is not None
        counts = _kernels(text)
        most = ", ".join(f"{count} {name}" for name, count in counts.most_common(3))
        branches = len(re.findall(r" (?:conditional|while)\(", text))
        table.add_row(
            str(key), f"{counts.total()}", f"{branches}", f"{memory.temp_size_in_bytes / 1e6:.1f}",
            f"{memory.alias_size_in_bytes / 1e9:.2f}", f"{time.perf_counter() - started:.1f}", most,
        )  # fmt: skip
        if found.hlo is not None:
            found.hlo.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"\W+", "_", str(key)).strip("_")
            (found.hlo / f"{name}.txt").write_text(text, encoding="utf-8")
    Console(width=180).print(table)


def _options() -> argparse.Namespace:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--model", choices=CONFIGURATIONS, default="llama-3.1-8b")
    reader.add_argument("--layers", type=int, default=2, help="so many of the model's [2]")
    reader.add_argument("--layout", choices=LAYOUTS, help="of the parameters [the one they are served in]")
    reader.add_argument("--quantize", help="int8 or float8_e4m3fn [bfloat16]")
    reader.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="of decode steps [1 32]")
    reader.add_argument("--blocks", type=int, nargs="+", default=[16], help="of 128 tokens, of prompts' steps [16]")
    reader.add_argument("--capacity", type=int, default=8192, help="positions of a sequence [8192]")
    reader.add_argument("--hlo", type=Path, metavar="FOLDER", help="write each compiled program there")
    return reader.parse_args()


def _context(cfg: ModelConfig, plan: Any, found: argparse.Namespace, place: SingleDeviceSharding) -> ProgramContext:
    layout = found.layout or layout_for(cfg, plan.cache.attention)

    def make() -> Any:
        params = initialise(family(cfg).param_specs(cfg), jax.random.key(0), "bfloat16")
        return lay_out(params if found.quantize is None else quantise(params, cfg, found.quantize), cfg, layout)

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)

    params, slots = placed(jax.eval_shape(make)), placed(sampler.shapes(plan.sampler))
    return ProgramContext(cfg, params, placed(state.shapes(plan.cache)), slots, attention=plan.cache.attention)


def _kernels(text: str) -> Counter[str]:
    """Counts what the entry computation launches, by name without its number."""
    entry = text[text.index("\nENTRY") :]
    names = [found[1] for line in entry.splitlines() if (found := KERNEL.match(line))]
    return Counter(re.sub(r"[.\d]+$", "", name) for name in names)


if __name__ == "__main__":
    main()
