"""Whatever can change a program changes its digest, and nothing else does."""

import importlib.metadata
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ferrum_jax.compile import fingerprint
from ferrum_jax.compile.artifacts import Artifacts
from ferrum_jax.compile.fingerprint import Facts, describe_program, describe_settings, digest
from ferrum_jax.compile.sampler import SamplerSpec
from ferrum_jax.kvcache.state import CacheSpec
from ferrum_jax.models import family, specs
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.sharding.devices import find_device
from ferrum_jax.sharding.mesh import Placement, place_on_mesh
from tests.executor.conftest import CFG

CACHE = CacheSpec(num_layers=2, num_blocks=6, block_size=8, num_kv_heads=2, head_dim=10, dtype="float32")
SLOTS = SamplerSpec(num_slots=2, vocab_size=CFG.vocab_size, capacity=48)
PARAMS = specs.initialise(family(CFG).param_specs(CFG), jax.random.key(0), "float32")


def _facts(**changes: Any) -> Facts:
    given: dict[str, Any] = {
        "cfg": CFG,
        "params": PARAMS,
        "cache": CACHE,
        "slots": SLOTS,
        "loras": None,
        "placement": Placement((find_device("cpu"),)),
    }
    return describe_program(**(given | changes))


class OtherClient:
    platform_version = "cuda 13.0"


class OtherDevice:
    id, platform, device_kind, client = 0, "gpu", "NVIDIA H200", OtherClient()

    def memory_stats(self) -> None:
        return None


def _half(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


ASKED: dict[str, dict[str, Any]] = {
    "model configuration": {"cfg": replace(CFG, rms_norm_eps=1e-5)},
    "windows": {"cfg": replace(CFG, layer_windows=(None, None))},
    "parameters' dtype": {"params": _half(PARAMS)},
    "parameters' shapes": {"params": jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), PARAMS)},
    "parameters' names": {"params": PARAMS | {"more": jnp.zeros(3)}},
    "parameters' place": {"params": jax.device_put(PARAMS, jax.local_devices()[0])},
    "blocks": {"cache": replace(CACHE, num_blocks=7)},
    "block size": {"cache": replace(CACHE, block_size=4)},
    "KV's dtype": {"cache": replace(CACHE, dtype="bfloat16")},
    "KV's layout": {"cache": replace(CACHE, layout="positions")},
    "backend of attention": {"cache": replace(CACHE, attention="triton")},
    "slots": {"slots": replace(SLOTS, num_slots=3)},
    "positions of a sequence": {"slots": replace(SLOTS, capacity=64)},
    "adapters": {"loras": LoraSpec(max_loras=1, max_rank=2)},
    "device": {"placement": Placement((OtherDevice(),))},
    "mesh": {"placement": place_on_mesh({"model": 2}, find_device("cpu"))[0]},
}


@pytest.mark.parametrize("name", ASKED)
def test_every_part_of_what_was_asked_counts(name: str):
    assert digest(_facts(**ASKED[name])) != digest(_facts())


def test_stacks_of_another_shape_are_others():
    one, other = (_facts(loras=LoraSpec(max_loras=2, max_rank=rank)) for rank in (2, 3))
    assert digest(one) != digest(other)


def test_the_same_mesh_on_other_devices_is_another():
    first, *others = jax.devices("cpu")[:3]
    each = [(first, other) for other in others]
    one, other = (Placement(pair, Mesh(np.array([pair]), ("expert", "model"))) for pair in each)
    assert (one.first, one.sizes) == (other.first, other.sizes)
    assert digest(_facts(placement=one)) != digest(_facts(placement=other))


def _upgrade(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Gives one package another version."""
    version = importlib.metadata.version

    def of(package: str) -> str:
        return "9" if package == name else version(package)

    return lambda patch: patch.setattr("importlib.metadata.version", of)


class OtherOptions:
    def SerializeAsString(self) -> bytes:  # noqa: N802  its name in jaxlib
        return b"--xla_other"


AROUND: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "this package": lambda patch: patch.setattr("ferrum_jax.__version__", "9"),
    "jax": lambda patch: patch.setattr(jax, "__version__", "9"),
    "jaxlib": lambda patch: patch.setattr("jaxlib.version.__version__", "9"),
    "numpy": _upgrade("numpy"),
    "flax": _upgrade("flax"),
    "ml-dtypes": _upgrade("ml-dtypes"),
    "python": lambda patch: patch.setattr("platform.python_version", lambda: "9"),
    "source": lambda patch: patch.setattr(fingerprint, "PACKAGE", Path(__file__).parent),
    "cores": lambda patch: patch.setattr(os, "sched_getaffinity", lambda _: set(range(99))),
    "machine": lambda patch: patch.setattr("platform.machine", lambda: "riscv"),
    "flags of XLA": lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2"),
    "flags of libtpu": lambda patch: patch.setenv("LIBTPU_INIT_ARGS", "--x"),
    "options of XLA": lambda patch: patch.setattr("jaxlib.xla_client.CompileOptions", OtherOptions),
    "process": lambda patch: patch.setattr(jax, "process_index", lambda: 1),
    "number of processes": lambda patch: patch.setattr(jax, "process_count", lambda: 2),
    "number of devices": lambda patch: patch.setattr(jax, "local_device_count", lambda: 2),
}


@pytest.mark.parametrize("name", AROUND)
def test_everything_around_counts(name: str, monkeypatch: pytest.MonkeyPatch):
    before = digest(_facts())
    AROUND[name](monkeypatch)
    assert digest(_facts()) != before


def test_what_changes_no_program_does_not_count(monkeypatch: pytest.MonkeyPatch):
    before = digest(_facts()), digest(describe_settings())
    for name in ("HOME", "TF_CPP_MIN_LOG_LEVEL", "XLA_PYTHON_CLIENT_MEM_FRACTION", "FERRUM_KV_CAPACITY"):
        monkeypatch.setenv(name, "1")
    with jax.log_compiles():
        assert (digest(_facts()), digest(describe_settings())) == before


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.default_matmul_precision("bfloat16"),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.debug_nans(True),
        lambda: jax.threefry_partitionable(False),
    ],
)
def test_settings_of_jax_count_in_the_thread_that_made_them(setting: Callable[[], Any], tmp_path: Path):
    before, store = digest(describe_settings()), Artifacts(tmp_path, {})
    folder = store.folder.path
    with setting():
        assert digest(describe_settings()) != before
        assert store.folder.path != folder
    assert store.folder.path == folder


def test_the_instruction_set_counts(tmp_path: Path):
    found = []
    for at, text in enumerate(
        ("flags\t: fpu avx2", "flags\t: avx2 fpu", "flags\t: fpu avx512f", "Features : asimd", "")
    ):
        path = tmp_path / str(at)
        path.write_text(f"processor\t: 0\n{text}\ncpu MHz\t: {at}\n\nprocessor\t: 1\nflags\t: {at}\n")
        found.append(digest(fingerprint.describe_host(path)))
    assert found[0] == found[1]
    assert len({*found, digest(fingerprint.describe_host(tmp_path / "none"))}) == 4


def test_source_counts_by_path_and_content(tmp_path: Path):
    def of(**files: str) -> str:
        for old in tmp_path.rglob("*.py"):
            old.unlink()
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return fingerprint.digest_source(tmp_path)

    digests = [of(a="1", b="2"), of(a="2", b="1"), of(a="1"), of(a="1", c="2"), of(a="1b", b="2")]
    assert len(set(digests)) == 5
    assert of(a="1", b="2") == digests[0]


def test_source_that_was_edited_while_the_process_runs_is_noticed(tmp_path: Path):
    path = tmp_path / "a.py"
    path.write_text("1")
    assert not fingerprint.is_edited(tmp_path, began=time.time() + 1)
    assert fingerprint.is_edited(tmp_path)
    began = time.time() - 100
    os.utime(path, (1.0, 1.0))  # as a copy that keeps the times of what it copies
    assert fingerprint.is_edited(tmp_path, began)


def test_a_link_that_leads_nowhere_is_no_source(tmp_path: Path):
    (tmp_path / "a.py").write_text("1")
    digest = fingerprint.digest_source(tmp_path)
    (tmp_path / ".#a.py").symlink_to("somebody@somewhere.1")
    assert fingerprint.digest_source(tmp_path) == digest
    assert not fingerprint.is_edited(tmp_path, began=time.time() + 1)


def test_leaves_in_another_order_are_other_parameters():
    def turned(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return OrderedDict((name, turned(tree[name])) for name in sorted(tree, reverse=True))

    assert digest(_facts(params=turned(PARAMS))) != digest(_facts())


def test_a_forked_process_is_as_old_as_what_it_has_imported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fingerprint, "IMPORTED_AT", 1.0)
    assert fingerprint.is_edited()


def test_flags_in_a_file_count_by_what_they_say(tmp_path: Path):
    code = "from ferrum_jax.compile import fingerprint; print(fingerprint._xla_options())"
    path = tmp_path / "flags"
    path.write_text("--xla_cpu_enable_fast_math=true")
    env = os.environ | {"XLA_FLAGS": str(path)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, text=True).stdout
    assert len(found) == 65
    assert found.strip() != fingerprint._xla_options()
