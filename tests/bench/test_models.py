"""The model under test is called what the option calls it, and random weights lie as served ones do."""

import argparse
import mmap
import re
from pathlib import Path

import jax
import pytest

from bench import kernels, models
from bench.models import TINY
from ferrum_jax.config import LAYOUTS, ModelConfig
from ferrum_jax.planning.subject import CONFIGURATIONS
from ferrum_jax.sharding.devices import find_device


@pytest.mark.parametrize(
    ("path", "name"), [("models--org--tiny/snapshots/f7a3", "org/tiny"), ("folder/tiny.gguf", "tiny.gguf")]
)
def test_a_model_of_the_hub_has_its_id_as_its_name(path: str, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.models.hub.resolve", lambda _: Path(path))
    monkeypatch.setattr("bench.models.load_params", lambda *_, **__: ({}, TINY))
    assert models.read(argparse.Namespace(smoke=False, model="asked"), "float32").name == name


@pytest.mark.skipif(find_device(None).platform != "cpu", reason="weights lie on another device")
@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
def test_random_weights_lie_in_huge_pages_on_a_cpu():
    name = "qwen3-30b-a3b"
    sparse = ModelConfig.from_hf(CONFIGURATIONS[name] | kernels.FEW | kernels.TINY | kernels.SMOKE[name])
    plain = models.random("tiny", TINY, "float32")
    trees = [plain.params, models.with_experts_in("tiny", sparse, "float32", kernels.KEPT["Q4_1"]).params]
    trees += [models.laid_out(plain, layout) for layout in LAYOUTS]
    addresses = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)}
    span = range(0)
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            span = range(int(found[1], 16), int(found[2], 16))
        elif line.startswith("VmFlags:") and "hg" in line.split():
            addresses = {at for at in addresses if at not in span}
    assert not addresses
