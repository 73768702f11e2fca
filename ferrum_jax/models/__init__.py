"""Models as pure functions over parameter and KV pytrees."""

import jax

from ferrum_jax.config import ModelConfig
from ferrum_jax.models import adapters as adapters
from ferrum_jax.models import specs as specs
from ferrum_jax.models.backends import cache_spec as cache_spec
from ferrum_jax.models.hooks import Captured as Captured
from ferrum_jax.models.hooks import Edit as Edit
from ferrum_jax.models.hooks import Intervention as Intervention
from ferrum_jax.models.hooks import Point as Point
from ferrum_jax.models.hooks import replace_with as replace_with
from ferrum_jax.models.quantisation import Format as Format
from ferrum_jax.models.quantisation import choose_formats, float_dtype
from ferrum_jax.models.quantisation import dequantise as dequantise
from ferrum_jax.models.quantisation import quantise as quantise
from ferrum_jax.models.registry import family as family
from ferrum_jax.models.sequences import capture as capture
from ferrum_jax.models.sequences import forward as forward
from ferrum_jax.models.sequences import log_probs as log_probs
from ferrum_jax.models.sequences import logits_of as logits_of
from ferrum_jax.models.sequences import run as run
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops.batch import Batch as Batch
from ferrum_jax.ops.batch import Rows as Rows
from ferrum_jax.ops.quantised import QuantisedWeight as QuantisedWeight
from ferrum_jax.ops.quantised import quantise_weight

config_from_hf = ModelConfig.from_hf
jax.tree_util.register_static(ModelConfig)  # here: `config` imports no JAX


def init_params(cfg: ModelConfig, key: jax.Array, dtype: str = "float32", *, quantize: str | None = None) -> ParamTree:
    """Draws random weights in a tree like that of `load_params`.

    With `quantize`, each matrix is drawn in float32 and quantised before the next: only one is in memory in float32.
    """
    dtype = float_dtype(dtype, "expected").name
    formats = {} if quantize is None else choose_formats(cfg, quantize)

    def draw(name: str, spec: specs.ParamSpec) -> jax.Array | QuantisedWeight:
        if name not in formats:
            return specs.draw(name, spec, key, dtype)
        return quantise_weight(specs.draw(name, spec, key, "float32"), formats[name].dtype, formats[name].groups)

    return specs.map_specs(draw, family(cfg).param_specs(cfg))
