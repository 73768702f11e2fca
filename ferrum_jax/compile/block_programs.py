"""Small programs beside the steps: copies of KV blocks, a sequence's keys and values, adapters put in place."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ferrum_jax.compile.step import ProgramContext
from ferrum_jax.kvcache import state
from ferrum_jax.models import adapters, specs
from ferrum_jax.models.adapters import LoraSpec


@dataclass(frozen=True, order=True)
class CopyKey:
    """Copies of up to so many KV blocks, for sequences that stop sharing one."""

    blocks: int

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program; the KV is donated."""
        return jax.jit(state.copy_blocks, donate_argnums=0).lower(context.kv, _ints(self.blocks, 2), _ints())


@dataclass(frozen=True, order=True)
class GatherKey:
    """One layer's keys and values of one sequence."""

    table_columns: int  # M blocks

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program."""
        return jax.jit(state.gather_sequence).lower(context.kv, _ints(), _ints(self.table_columns))


@dataclass(frozen=True, order=True)
class InstallKey:
    """An adapter put into one row of the stacks."""

    max_loras: int  # A
    max_rank: int  # R

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        """Lowers the program."""
        dtype = jax.tree.leaves(context.loras)[0].dtype.name
        spec = LoraSpec(max_loras=self.max_loras, max_rank=self.max_rank)
        tree = specs.shapes(adapters.adapter_specs(context.cfg, spec), dtype)
        return jax.jit(adapters.install).lower(context.loras, tree, _ints())


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
