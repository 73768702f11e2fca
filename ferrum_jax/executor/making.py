"""A runner for parameters that are there already, in a training loop say."""

from typing import Any

import jax

from ferrum_jax.config import EngineConfig, ModelConfig
from ferrum_jax.contract.errors import ConfigError, UnsupportedError
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.executor.sizing import plan_beside
from ferrum_jax.models.layout import layout_of
from ferrum_jax.models.quantised import activation_dtype
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.sharding.devices import free_bytes


def from_params(
    params: ParamTree, cfg: ModelConfig, *, engine: EngineConfig | None = None, strict: bool = False, **settings: Any
) -> ModelRunner:
    """Serves parameters as they are, without a copy, on the device where they lie.

    Args:
        params: the tree that `load_params` and `models.init_params` give, in any layout.
        cfg: the model's.
        engine: how to run it; what is None in it is chosen for the model and the device.
        strict: after `warmup`, a step that would have to be compiled is an error.
        **settings: fields of `EngineConfig`, which go before those of `engine`. Compiled steps are not kept on disk.

    Raises:
        ConfigError: settings contradict each other or the parameters.
        UnsupportedError: the parameters lie on several devices.
        ResourceExhaustedError: the KV that was asked for does not fit.
    """
    places = {device for leaf in jax.tree.leaves(params) for device in leaf.devices()}
    if len(places) != 1:
        raise UnsupportedError(f"the parameters lie on {len(places)} devices, a runner has one")
    (device,) = places
    given = EngineConfig(**settings).over(engine or EngineConfig())
    theirs = EngineConfig(dtype=activation_dtype(params).name, layout=layout_of(params))
    for name in ("dtype", "layout"):
        if getattr(given, name) not in (None, getattr(theirs, name)):
            raise ConfigError(f"{name} is {getattr(given, name)!r}, these parameters have {getattr(theirs, name)!r}")
    for name in ("quantize", "artifacts"):
        if getattr(given, name):
            raise ConfigError(
                f"{name} is {getattr(given, name)!r}, which belongs to `load`: parameters are as they are"
            )
    asked = theirs.over(given).over(EngineConfig.from_environment())
    plan = plan_beside(params, asked, cfg, platform=device.platform, free_bytes=free_bytes(device))
    return ModelRunner(params, cfg, plan, device=device, strict=strict)
