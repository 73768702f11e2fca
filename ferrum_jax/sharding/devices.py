"""The machine's devices: by name, with their free memory and the dtype that suits them."""

import re
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import psutil

from ferrum_jax.contract.errors import DeviceError, InvalidParameterError, safe_repr
from ferrum_jax.contract.values import Device

CGROUPS = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")
AMPLE = 1 << 60  # bytes, where memory is not the question


@runtime_checkable
class JaxDevice(Protocol):
    """The part of a `jax.Device`, which has no public type, that this package uses."""

    id: int
    platform: str
    device_kind: str

    def memory_stats(self) -> dict[str, Any] | None:
        """Bytes in use and the limit, where the backend reports them."""
        ...


def find_device(device: "str | Device | JaxDevice | None") -> JaxDevice:
    """Returns the JAX device of a name; for None, JAX's default device in this thread (`jax.default_device`).

    The name `gpu` stands for NVIDIA's, `cuda`.
    """
    if device is None:
        return _default_device()
    if isinstance(device, JaxDevice):
        return device
    if not isinstance(device, (str, Device)):
        raise InvalidParameterError(f"device is {safe_repr(device)}, expected a name, a Device or one of JAX's")
    try:
        wanted = device if isinstance(device, Device) else Device.parse(re.sub(r"^gpu(?=:|$)", "cuda", device))
        found = _devices_of(wanted.kind)
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
        return _devices_of(chosen)[0]  # the first of all where nothing was chosen
    except RuntimeError as problem:
        what = "there is no default device" if chosen is None else f"jax_default_device is {chosen!r}"
        raise DeviceError(f"{what}: {problem}") from None


def _devices_of(platform: str | None) -> list[Any]:
    """Returns this process's devices of a platform, or of JAX's first; raises RuntimeError if there are none."""
    try:
        return jax.local_devices(backend=platform)
    except AssertionError:  # JAX asserts that a platform is left
        asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]  # JAX adds it when imported
        raise RuntimeError(f"JAX_PLATFORMS is {asked!r}, and no such device is here") from None


def host_device(otherwise: JaxDevice | None = None) -> JaxDevice:
    """Returns the CPU; where JAX has none, as under `JAX_PLATFORMS=cuda`, another device or JAX's default one."""
    try:
        return find_device("cpu")
    except DeviceError:
        return find_device(otherwise)


def process_of(device: JaxDevice) -> int:
    """Returns the index of the process that a device belongs to."""
    return getattr(device, "process_index", 0)


def default_dtype(device: JaxDevice) -> str:
    """Float32 on CPU, where XLA's narrower products are slow; bfloat16 elsewhere."""
    return "float32" if device.platform == "cpu" else "bfloat16"


def free_bytes(device: JaxDevice, *, is_needed: bool = True) -> int:
    """Bytes that are free on a device now; on a CPU, those of the machine that this process's container allows.

    For a device that does not report it, `AMPLE` if the figure is not needed.

    Raises:
        DeviceError: it is needed, and the device does not report it.
    """
    if device.platform == "cpu":
        available, allowed = psutil.virtual_memory().available, allowed_bytes()
        return available if allowed is None else min(available, allowed)
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        if not is_needed:
            return AMPLE
        raise DeviceError(f"{device} does not report its free memory: give kv_blocks")
    return stats["bytes_limit"] - stats["bytes_in_use"]


def allowed_bytes(membership: Path = CGROUPS, mount: Path = CGROUP_MOUNT) -> int | None:
    """Bytes that the tightest control group of this process leaves, or None where no group has a limit.

    A container's limit is not the host's: `memory.max` of cgroup v2, `memory.limit_in_bytes` of v1, see `cgroups(7)`.
    Pages of files that were not used lately count as free: they are given back when memory runs short.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    left = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, names = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A limit above holds below as well. In a container the path may be the host's: then the mount is the group.
        path = Path(group.lstrip("/"))
        left += [_left(root / place, *names) for place in (path, *path.parents)]
    return min((found for found in left if found is not None), default=None)


def _left(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        most = (group / limit).read_text(encoding="utf-8").strip()
        used = int((group / usage).read_text(encoding="utf-8"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    except OSError:
        return None
    return None if most == "max" else max(0, int(most) - used + int(counts.get(reclaimable, 0)))
