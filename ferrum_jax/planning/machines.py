"""Devices to plan for, with the figures of their data sheets.

| device | source |
|---|---|
| h100 | NVIDIA H100 Tensor Core GPU data sheet, H100 SXM; network: NVIDIA DGX H100 data sheet |
| h200 | NVIDIA H200 Tensor Core GPU data sheet, H200 SXM; network: NVIDIA DGX H200 data sheet |
| b200 | NVIDIA DGX B200 data sheet, an eighth of each figure |
| a100 | NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM; network: NVIDIA DGX A100 data sheet |
| l40s | NVIDIA L40S GPU data sheet |
| v5e | Google Cloud documentation, "TPU v5e" |
| v5p | Google Cloud documentation, "TPU v5p" |
| v6e | Google Cloud documentation, "TPU v6e" |

Rates of products are those without sparsity, half of what NVIDIA prints with it. Bandwidths of links are those of one
direction. A ring uses two links of a TPU, those of one axis of its torus; the data sheet's figure covers all four (v5e,
v6e) or six (v5p).

Latencies are on no data sheet. Assumed are 10 us for a collective of NCCL among the GPUs of one host and 30 us across
hosts, whatever its size, and 1 us for each hop of a TPU's ring (Austin et al. 2025, "How to Scale Your Model").
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ferrum_jax.contract.errors import ConfigError, safe_repr

GB, GIB, TERA = 10**9, 2**30, 10**12


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects devices."""

    name: str
    bandwidth: float  # bytes per second that a device sends, while it receives as many
    most_devices: int  # that it connects
    latency: float = 0.0  # seconds of a collective, whatever its size
    hop: float = 0.0  # seconds from one device to the next


@dataclass(frozen=True)
class Machine:
    """One kind of device, and what connects several of them."""

    name: str
    platform: str  # as JAX calls it
    memory_bytes: int
    memory_rate: float  # bytes per second
    bf16_rate: float  # operations per second of dense products, a multiplication and an addition being two
    links: tuple[Link, ...] = ()  # the quickest first

    def link(self, devices: int) -> Link:
        """Returns the quickest link that connects so many devices.

        Raises:
            ConfigError: the table knows none.
        """
        for link in self.links:
            if devices <= link.most_devices:
                return link
        most = max((link.most_devices for link in self.links), default=1)
        raise ConfigError(f"one model on {devices} {self.name}: what connects them is known for up to {most} devices")


def _nvlink(generation: int, bandwidth: float) -> Link:
    return Link(name=f"NVLink {generation}", bandwidth=bandwidth, most_devices=8, latency=10e-6)


def _infiniband(gigabits: int) -> Link:
    """One adapter for each GPU."""
    return Link(name=f"InfiniBand {gigabits} Gb/s", bandwidth=gigabits * GB / 8, most_devices=1024, latency=30e-6)


def _torus(gigabits: int, links: int, chips: int) -> Link:
    """Two of the links of a chip, whose bandwidths together are so many gigabits per second."""
    return Link(name="ICI", bandwidth=2 * gigabits * GB / 8 / links, most_devices=chips, hop=1e-6)


_PCIE = Link(name="PCIe 4.0 x16", bandwidth=32 * GB, most_devices=8, latency=10e-6)

MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine("h100", "gpu", 80 * GB, 3.35 * TERA, 989.5 * TERA, (_nvlink(4, 450 * GB), _infiniband(400))),
        Machine("h200", "gpu", 141 * GB, 4.8 * TERA, 989.5 * TERA, (_nvlink(4, 450 * GB), _infiniband(400))),
        Machine("b200", "gpu", 180 * GB, 8 * TERA, 2250 * TERA, (_nvlink(5, 900 * GB), _infiniband(400))),
        Machine("a100", "gpu", 80 * GB, 2.039 * TERA, 312 * TERA, (_nvlink(3, 300 * GB), _infiniband(200))),
        Machine("l40s", "gpu", 48 * GB, 0.864 * TERA, 362.05 * TERA, (_PCIE,)),
        Machine("v5e", "tpu", 16 * GB, 0.819 * TERA, 197 * TERA, (_torus(1600, 4, 256),)),
        Machine("v5p", "tpu", 95 * GIB, 2.765 * TERA, 459 * TERA, (_torus(4800, 6, 6144),)),
        Machine("v6e", "tpu", 32 * GB, 1.6 * TERA, 918 * TERA, (_torus(3200, 4, 256),)),
    )
}


def find_machine(name: str) -> Machine:
    """Returns a device of the table by its name, in any case.

    Raises:
        ConfigError: the table has none of this name.
    """
    found = MACHINES.get(name.lower())
    if found is None:
        raise ConfigError(f"device is {safe_repr(name)}, known are {', '.join(MACHINES)}")
    return found
