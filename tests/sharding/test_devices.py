"""Devices by name, and what they say of themselves."""

from dataclasses import dataclass
from typing import Any

import jax
import psutil
import pytest

from ferrum_jax.contract import Device
from ferrum_jax.contract.errors import DeviceError, InvalidParameterError
from ferrum_jax.sharding.devices import AMPLE, default_dtype, find_device, free_bytes


@dataclass
class FakeDevice:
    id: int = 0
    platform: str = "gpu"
    device_kind: str = "fake"
    stats: dict[str, Any] | None = None

    def memory_stats(self) -> dict[str, Any] | None:
        return self.stats


def test_a_device_is_found_by_name_by_value_and_by_default():
    cpu = jax.local_devices(backend="cpu")[0]
    assert find_device("cpu") is cpu
    assert find_device(Device("cpu")) is cpu
    assert find_device(None) is jax.local_devices()[0]
    given = FakeDevice()
    assert find_device(given) is given


def test_the_default_device_is_the_one_that_jax_was_told(monkeypatch: pytest.MonkeyPatch):
    asked: list[str | None] = []

    def local_devices(backend: str | None = None) -> list[FakeDevice]:
        asked.append(backend)
        if backend == "tpu":
            raise RuntimeError("no tpu here")
        return [FakeDevice(device_kind=backend or "first"), FakeDevice(id=1)]

    cpu = jax.local_devices(backend="cpu")[0]
    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert find_device(None).device_kind == "first"
    assert find_device("gpu").device_kind == find_device("gpu:0").device_kind == "cuda"
    assert asked.pop() == asked.pop() == "cuda"
    with jax.default_device(cpu):
        assert find_device(None) is cpu
    with jax.default_device("cpu"):
        assert find_device(None).device_kind == "cpu"
    with jax.default_device("tpu"), pytest.raises(DeviceError, match="jax_default_device is 'tpu': no tpu here"):
        find_device(None)
    assert asked == [None, "cpu", "tpu"]


def test_a_containers_limit_bounds_what_is_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ferrum_jax.sharding.devices.allowed_bytes", lambda: 12345)
    assert free_bytes(find_device("cpu")) == 12345
    monkeypatch.setattr("ferrum_jax.sharding.devices.allowed_bytes", lambda: 2**62)
    assert free_bytes(find_device("cpu")) <= psutil.virtual_memory().total


@pytest.mark.parametrize("name", ["", "npu", "gpus", "cpu:1", "cuda:-1", "CPU", "cuda:0:0"])
def test_a_name_that_names_no_device_is_refused(name: str):
    with pytest.raises(InvalidParameterError):
        find_device(name)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend: [FakeDevice(), FakeDevice(id=1)])
    assert find_device("cuda:1").id == 1
    with pytest.raises(DeviceError, match="device cuda:2: there are 2 of its kind"):
        find_device("cuda:2")

    def absent(backend: str) -> list[FakeDevice]:
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", absent)
    with pytest.raises(DeviceError, match="device tpu:0: Unknown backend tpu"):
        find_device("tpu:0")


def test_platforms_of_which_none_is_there_are_refused(monkeypatch: pytest.MonkeyPatch):
    def asserting(backend: str | None) -> list[FakeDevice]:
        raise AssertionError  # as JAX does where only cuda is asked for, and no driver is there

    monkeypatch.setattr(jax, "local_devices", asserting)
    for name in (None, "cpu"):
        with pytest.raises(DeviceError, match="and no such device is here"):
            find_device(name)


def test_the_dtype_suits_the_device():
    assert default_dtype(find_device("cpu")) == "float32"
    assert default_dtype(FakeDevice()) == default_dtype(FakeDevice(platform="tpu")) == "bfloat16"


def test_free_memory_is_what_the_backend_leaves():
    assert free_bytes(FakeDevice(stats={"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert 0 < free_bytes(find_device("cpu")) <= psutil.virtual_memory().total
    for silent in (None, {}, {"bytes_in_use": 3}):
        with pytest.raises(DeviceError, match="give kv_blocks"):
            free_bytes(FakeDevice(stats=silent))
        assert free_bytes(FakeDevice(stats=silent), is_needed=False) == AMPLE
