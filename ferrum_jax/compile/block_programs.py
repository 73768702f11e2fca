"""Small programs beside the steps: they copy KV blocks, gather a sequence's keys and values, and install adapters."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ferrum_jax.compile.step import ProgramContext
from ferrum_jax.kvcache import state
from ferrum_jax.models import adapters, division, specs
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.sharding.mesh import WHOLE


@dataclass(frozen=True, order=True)
class CopyKey:
    """Copies up to so many KV blocks, for sequences that stop sharing one."""

    blocks: int

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program; the KV is donated."""
        copy = context.spread(state.copy_blocks, (context.kv_specs, WHOLE, WHOLE), context.kv_specs)
        return jax.jit(copy, donate_argnums=0).lower(context.kv, _ints(self.blocks, 2), _ints())


@dataclass(frozen=True, order=True)
class GatherKey:
    """Copies one layer's keys and values of one sequence out of the KV."""

    table_columns: int  # M blocks

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program."""
        heads = WHOLE if context.kv.layout in state.LATENTS else PartitionSpec(None, context.kv_axes)
        gather = context.spread(state.gather_sequence, (context.kv_specs, WHOLE, WHOLE), (heads, heads))
        return jax.jit(gather, out_shardings=context.readable).lower(context.kv, _ints(), _ints(self.table_columns))


@dataclass(frozen=True, order=True)
class InstallKey:
    """Puts an adapter into one row of the stacks."""

    max_loras: int  # A
    max_rank: int  # R

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program."""
        dtype = jax.tree.leaves(context.loras)[0].dtype.name
        spec = LoraSpec(max_loras=self.max_loras, max_rank=self.max_rank)
        own, divided = adapters.adapter_specs(context.cfg, spec), None
        if context.division is not None:
            divided = division.partitions(own, context.division)
            own = division.specs_on_mesh(own, context.division)
        tree = specs.shapes(own, dtype)
        if context.placement is not None and divided is not None:
            tree = context.placement.place(tree, divided)
        install = context.spread(adapters.install, (context.lora_specs, divided, WHOLE), context.lora_specs)
        return jax.jit(install).lower(context.loras, tree, _ints())


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
