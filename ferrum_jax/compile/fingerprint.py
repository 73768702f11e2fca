"""What a compiled step depends on, as plain data: where any of it differs, the step is another one."""

import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import psutil

from ferrum_jax.compile.sampler import SamplerSpec
from ferrum_jax.config import ENVIRONMENT, ModelConfig
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.models.specs import ParamTree, named_leaves
from ferrum_jax.ops import native
from ferrum_jax.sharding.mesh import Placement

Facts = dict[str, Any]  # what JSON can hold
PACKAGE = Path(__file__).parents[1]
IMPORTED_AT: float = importlib.import_module("ferrum_jax").IMPORTED_AT
PACKAGES = ("numpy", "flax", "ml-dtypes")  # whose code is part of what is traced or kept
COMPILERS = ("XLA_", "LIBTPU_", "TPU_", "TF_XLA_", "TF_CUDNN_", "NVIDIA_TF32_", "CUBLAS_", "CUDNN_", "PJRT_", "NPROC")
# Of JAX's settings, those that say how it reports, guards and caches. All that are not listed here count.
SILENT = (
    "jax_array_garbage_collection_guard", "jax_check_tracer_leaks", "jax_compilation_cache", "jax_compiler_detailed",
    "jax_debug_log_modules", "jax_dump_ir", "jax_enable_compilation_cache", "jax_explain_cache_misses",
    "jax_include_debug_info_in_dumps", "jax_log", "jax_no_execution", "jax_no_tracing", "jax_persistent_cache",
    "jax_pprint", "jax_raise_persistent_cache_errors", "jax_traceback_filtering", "jax_tracer_error",
    "jax_transfer_guard",
)  # fmt: skip


def describe_program(
    cfg: ModelConfig,
    params: ParamTree,
    cache: CacheSpec,
    slots: SamplerSpec,
    loras: LoraSpec | None,
    placement: Placement,
) -> Facts:
    """Gathers all that the steps of one engine depend on, except JAX's settings, which may change at any time."""
    return {
        "code": describe_code(),
        "machine": describe_machine(placement),
        "model": dataclasses.asdict(cfg),
        "parameters": [[name, _described(leaf)] for name, leaf in named_leaves(params).items()],  # as steps take them
        "kv": dataclasses.asdict(cache)
        | {"arrays": [_described(leaf) for leaf in jax.tree.leaves(state.shapes(cache))]},
        "sampler": dataclasses.asdict(slots),
        "adapters": None if loras is None else dataclasses.asdict(loras),
    }


def describe_code() -> Facts:
    """Versions, and a digest of this package's own source."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "ferrum_jax": importlib.import_module("ferrum_jax").__version__,
        "source": digest_source(PACKAGE),
        "kernels": native.digest(),
        "instruction_set": native.instruction_set(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        **versions,
    }


def digest_source(package: Path) -> str:
    """Digest of every module below a folder, by path and content."""
    total = hashlib.sha256()
    for path in _modules(package):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return total.hexdigest()


def is_edited(package: Path = PACKAGE, began: float | None = None) -> bool:
    """True if source has changed since this process began, so that the code that runs may not be the digested one.

    A process that was forked has the modules that its parent imported before. `began`, in seconds since 1970, stands
    for another moment.
    """
    began = min(psutil.Process().create_time(), IMPORTED_AT) if began is None else began
    times = [(found.st_mtime, found.st_ctime) for found in (path.stat() for path in _modules(package))]
    return any(max(changed) > began for changed in times)  # a copy with its old mtime has a new ctime


def _modules(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*.py") if path.is_file())  # an editor's lock is a dangling link


def describe_machine(placement: Placement) -> Facts:
    """The devices, the default device, the host and the compiler's environment."""
    return {
        "device": _described_device(placement.first),
        "mesh": placement.sizes,
        "device_ids": [device.id for device in placement.devices],
        "default_device": _described_device(jax.local_devices()[0]),
        "devices": jax.local_device_count(),
        "process": [jax.process_index(), jax.process_count()],  # each keeps the part that runs on its own devices
        "host": describe_host(),
        "environment": compiler_variables(ENVIRONMENT),
        "xla_options": _xla_options(),
    }


def describe_host(cpuinfo: Path = Path("/proc/cpuinfo")) -> Facts:
    """The instruction set, and how many threads XLA divides work among."""
    wanted = ("vendor_id", "model name", "flags", "CPU implementer", "CPU architecture", "CPU part", "Features")
    try:
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:  # not Linux
        first = ""
    parts = [line.partition(":") for line in first.splitlines()]
    lines = {name.strip(): value for name, _, value in parts}
    found = {name: " ".join(sorted(lines[name].split())) for name in wanted if name in lines}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": cores,
        "processor": platform.processor(),
    } | found


def compiler_variables(variables: Mapping[str, str]) -> Facts:
    """Picks the variables that the compilers below JAX read; JAX's own are its settings."""
    chosen = {name for name in variables if name.startswith(COMPILERS) and not name.startswith("XLA_PYTHON_CLIENT_")}
    return {name: variables[name] for name in sorted(chosen)}


def _xla_options() -> str | None:
    """Digest of the options that XLA compiles with, whichever file or variable they came from, and whenever.

    None if this jaxlib does not tell.
    """
    try:
        from jaxlib import xla_client

        options: bytes = xla_client.CompileOptions().SerializeAsString()
    except (ImportError, AttributeError):
        return None
    return hashlib.sha256(options).hexdigest()


def describe_settings() -> Facts:
    """JAX's settings as this thread sees them."""
    names = sorted(name for name in jax.config.values if not name.startswith(SILENT))
    return {name: repr(getattr(jax.config, name, jax.config.values[name])) for name in names}


def digest(facts: Facts) -> str:
    """Digest of facts, whatever their order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _described(leaf: Any) -> str:
    """An array, or a shape with a sharding: such shapes stand for arrays put there."""
    placed = getattr(leaf, "sharding", None)
    layout = getattr(getattr(leaf, "format", None), "layout", None)
    order = getattr(layout, "major_to_minor", None)
    unusual = "" if order is None or list(order) == sorted(order) else f" {order}"
    return (
        f"{leaf.dtype}{list(leaf.shape)}{unusual} {placed} committed={getattr(leaf, 'committed', placed is not None)}"
    )


def _described_device(device: Any) -> Facts:
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "version": device.client.platform_version,
        "capability": str(getattr(device, "compute_capability", None)),
    }
