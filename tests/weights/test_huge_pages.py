"""Copies are exact, lie apart and are taken by JAX as they lie; loaded parameters are such copies."""

import gc
import itertools
import mmap
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ferrum_jax
from ferrum_jax.weights import huge_pages, orbax
from ferrum_jax.weights.huge_pages import LINE, PAGE, DevicePlacer, HugePages
from tests import tiny

NAME = "qwen3_llama3"

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")


def test_copies_are_exact_and_lie_apart():
    rng, pages = np.random.default_rng(0), HugePages()
    shapes = [(), (0,), (3,), (5, 7), (2, 3, 4), (huge_pages.CHUNK // 4 + 1,), (1000, 1000)]
    given = [
        rng.integers(255, size=shape).astype(kind) for shape in shapes for kind in (np.float32, jnp.bfloat16, np.int8)
    ]
    given.append(rng.standard_normal((30, 40)).T)
    found = [pages.copy(one) for one in given]
    for one, copied in zip(given, found, strict=True):
        assert copied.dtype == one.dtype
        np.testing.assert_array_equal(copied, one)
        assert copied.ctypes.data % LINE == 0
        assert copied.flags.c_contiguous
    spans = sorted((one.ctypes.data, one.ctypes.data + one.nbytes) for one in found if one.nbytes)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
def test_the_system_is_asked_for_huge_pages():
    at, mapping = HugePages().copy(np.ones(1000)), ""
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            mapping = line if int(span[1], 16) <= at.ctypes.data < int(span[2], 16) else ""
        elif mapping and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    raise AssertionError("the copy is in no mapping")


def test_memory_that_cannot_be_mapped_is_a_memory_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=r"69,206,016 bytes cannot be mapped: .*Cannot allocate"):
        HugePages().copy(np.ones(1000))


def test_jax_takes_a_copy_as_it_lies():
    copied = HugePages().copy(np.arange(12, dtype=np.float32))
    assert jax.device_put(copied).unsafe_buffer_pointer() == copied.ctypes.data


def test_what_is_put_is_no_view_of_what_was_given():
    given = np.ones(1 << 20)
    found = DevicePlacer(jax.local_devices(backend="cpu")[0])({"a": given})
    given[:] = 2
    assert float(found["a"].sum()) == 1 << 20


def test_a_stack_is_filled_with_one_part_at_a_time():
    alive, most = [], 0

    class Part(np.ndarray[Any, Any]):
        pass

    def parts() -> Iterator[Any]:
        nonlocal most
        for value in range(4):
            part = np.full(1000, value, np.int32).view(Part)
            alive.append(weakref.ref(part))
            most = max(most, sum(one() is not None for one in alive))
            yield {"a": part}
            del part

    found = DevicePlacer(jax.local_devices(backend="cpu")[0]).stack(parts(), 4)
    np.testing.assert_array_equal(found["a"], np.repeat(np.arange(4), 1000).reshape(4, 1000))
    assert most == 1


def test_a_chunk_is_freed_with_the_last_copy_in_it():
    pages = HugePages()
    found = [pages.copy(np.ones(1000)) for _ in range(3)]
    chunk = weakref.ref(found[0].base)
    del pages, found[:2]
    gc.collect()
    assert chunk() is not None
    assert found[0].sum() == 1000
    found.clear()
    gc.collect()
    assert chunk() is None


@pytest.mark.parametrize("layout", ["checkpoint", "fused", "scanned"])
@pytest.mark.parametrize("stored", ["safetensors", "orbax"])
def test_parameters_that_are_loaded_lie_one_after_the_other(stored: str, layout: str, tmp_path: Path):
    if stored == "orbax":
        orbax.save(tmp_path / "saved", tiny.tiny_params(tiny.CONFIGS[NAME]), tiny.model_config(NAME))
    else:
        tiny.write_folder(tmp_path / "saved", tiny.CONFIGS[NAME])
    found, _ = ferrum_jax.load_params(tmp_path / "saved", layout=layout)
    spans = sorted((leaf.unsafe_buffer_pointer(), leaf.nbytes) for leaf in jax.tree.leaves(found))
    assert spans[0][0] % PAGE == 0
    assert all(at + -(-size // LINE) * LINE == after for (at, size), (after, _) in itertools.pairwise(spans))
