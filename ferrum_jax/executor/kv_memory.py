"""Where a model's empty KV comes from."""

import jax

from ferrum_jax.compile.artifacts import Artifacts, build
from ferrum_jax.contract.errors import ResourceExhaustedError
from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import CacheSpec, KvState
from ferrum_jax.sharding.devices import JaxDevice

EMPTY_KV = "empty KV"  # what the call that makes it is kept as


class KvMemory:
    """Allocates KVs of one size on one device."""

    def __init__(self, spec: CacheSpec, device: JaxDevice, artifacts: Artifacts | None = None):
        """Compiles the call; allocates nothing.

        Raises:
            ResourceExhaustedError: it does not compile.
        """
        placed = jax.sharding.SingleDeviceSharding(device)
        self.spec = spec
        self.shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), state.shapes(spec)
        )
        self._ahead: KvState[jax.Array] | None = None
        empty = jax.jit(state.empty, static_argnums=0, out_shardings=placed)
        try:
            self._empty = build(EMPTY_KV, lambda: empty.lower(spec), artifacts)
        except jax.errors.JaxRuntimeError as problem:
            raise ResourceExhaustedError(
                f"a KV of {spec.num_blocks} blocks ({spec.num_bytes:,} bytes) cannot be compiled for: {problem}"
            ) from problem

    def allocate_ahead(self) -> None:
        """Allocates what the next `allocate` gives; raises as it does."""
        self._ahead = self.allocate()

    def allocate(self) -> KvState[jax.Array]:
        """Gives a KV of zeros.

        Raises:
            ResourceExhaustedError: the device has not so much memory left.
        """
        ready, self._ahead = self._ahead, None
        if ready is not None:
            return ready
        try:
            return jax.block_until_ready(self._empty())
        except jax.errors.JaxRuntimeError as problem:
            raise ResourceExhaustedError(
                f"a KV of {self.spec.num_blocks} blocks ({self.spec.num_bytes:,} bytes) cannot be allocated: {problem}"
            ) from problem
