"""The machine's devices: by name, with their free memory and the dtype that suits them."""

from typing import Any, Protocol

import jax
import psutil

from ferrum_jax.contract.errors import DeviceError
from ferrum_jax.contract.values import Device


class JaxDevice(Protocol):
    """What this package uses of a `jax.Device`, which has no type of its own."""

    id: int
    platform: str
    device_kind: str

    def memory_stats(self) -> dict[str, Any] | None:
        """Bytes in use and the limit, where the backend tells."""
        ...


def find_device(device: "str | Device | JaxDevice | None") -> JaxDevice:
    """Gives the JAX device of a name; JAX's default device for None."""
    if device is not None and not isinstance(device, (str, Device)):
        return device
    try:
        if device is None:
            return jax.local_devices()[0]
        wanted = device if isinstance(device, Device) else Device.parse(device)
        found = jax.local_devices(backend=wanted.kind)
    except RuntimeError as problem:
        raise DeviceError(f"device {device}: {problem}") from None
    if wanted.index >= len(found):
        raise DeviceError(f"device {wanted}: there are {len(found)} of its kind")
    return found[wanted.index]


def default_dtype(device: JaxDevice) -> str:
    """Float32 on CPU, where XLA's narrower products are slow; bfloat16 elsewhere."""
    return "float32" if device.platform == "cpu" else "bfloat16"


def free_bytes(device: JaxDevice) -> int:
    """Memory that is free on a device now."""
    if device.platform == "cpu":
        return psutil.virtual_memory().available
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise DeviceError(f"{device} does not tell its free memory: give kv_blocks")
    return stats["bytes_limit"] - stats["bytes_in_use"]
