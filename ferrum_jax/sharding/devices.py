"""The machine's devices: by name, with their free memory and the dtype that suits them."""

from typing import Any, Protocol, runtime_checkable

import jax
import psutil

from ferrum_jax.contract.errors import DeviceError, InvalidParameterError, shown
from ferrum_jax.contract.values import Device
from ferrum_jax.sharding.cgroups import allowed_bytes


@runtime_checkable
class JaxDevice(Protocol):
    """What this package uses of a `jax.Device`, which has no type of its own."""

    id: int
    platform: str
    device_kind: str

    def memory_stats(self) -> dict[str, Any] | None:
        """Bytes in use and the limit, where the backend tells."""
        ...


def find_device(device: "str | Device | JaxDevice | None") -> JaxDevice:
    """Gives the JAX device of a name; for None JAX's default device, as `jax.default_device` and its setting say."""
    if device is None:
        return _default_device()
    if isinstance(device, JaxDevice):
        return device
    if not isinstance(device, (str, Device)):
        raise InvalidParameterError(f"device is {shown(device)}, expected a name, a Device or one of JAX's")
    try:
        wanted = device if isinstance(device, Device) else Device.parse(device)
        found = jax.local_devices(backend=wanted.kind)
    except RuntimeError as problem:
        raise DeviceError(f"device {device}: {problem}") from None
    if wanted.index >= len(found):
        raise DeviceError(f"device {wanted}: there are {len(found)} of its kind")
    return found[wanted.index]


def _default_device() -> JaxDevice:
    chosen = jax.config.values["jax_default_device"]
    if chosen is not None and not isinstance(chosen, str):
        return chosen
    try:
        return jax.local_devices(backend=chosen)[0]  # the first of all where nothing was chosen
    except RuntimeError as problem:
        raise DeviceError(f"jax_default_device is {chosen!r}: {problem}") from None


def default_dtype(device: JaxDevice) -> str:
    """Float32 on CPU, where XLA's narrower products are slow; bfloat16 elsewhere."""
    return "float32" if device.platform == "cpu" else "bfloat16"


def free_bytes(device: JaxDevice) -> int:
    """Memory that is free on a device now; on a CPU, what the machine has and this process's container allows."""
    if device.platform == "cpu":
        available, allowed = psutil.virtual_memory().available, allowed_bytes()
        return available if allowed is None else min(available, allowed)
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise DeviceError(f"{device} does not tell its free memory: give kv_blocks")
    return stats["bytes_limit"] - stats["bytes_in_use"]
