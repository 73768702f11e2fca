"""`config.json` of Phi-3, Phi-3.5 and Phi-4: the dense ones, all of model_type `phi3`."""

from collections.abc import Mapping
from typing import Any

from ferrum_jax.config.common import read_activation, read_sizes, read_switch
from ferrum_jax.config.rope import read_partial_rope
from ferrum_jax.contract.errors import UnsupportedError

IMPLEMENTED = ()
ORIGINAL = 4096  # positions, where nothing is said: Hugging Face's own default
EARLIER = ("su", "yarn")  # names that LongRoPE had here


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a `ModelConfig`."""
    read_activation(config, "hidden_act", "silu", ("silu", "swish"))
    sizes = read_sizes({"rms_norm_eps": 1e-5, **config})
    theta, scaling, partial = read_partial_rope({"original_max_position_embeddings": ORIGINAL, **_renamed(config)})
    if scaling is not None and scaling.rope_type != "longrope":
        raise UnsupportedError(f"rope_type {scaling.rope_type!r} is not implemented for phi3, only longrope is")
    return {
        **sizes,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "partial_rotary_factor": partial,
        "tie_word_embeddings": read_switch(config, "tie_word_embeddings"),
        "layer_windows": (config.get("sliding_window"),) * sizes["num_hidden_layers"],
    }


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        if isinstance(given, Mapping) and given.get("rope_type", given.get("type")) in EARLIER:
            found[name] = {**given, "rope_type": "longrope"}
    return found
