"""The choice of an attention backend for a model on a device, and the KV layout that the backend reads."""

import importlib.util
import logging
from dataclasses import replace

import jax
import jax.numpy as jnp

from ferrum_jax.config import ATTENTIONS, EngineConfig, ModelConfig
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, safe_repr
from ferrum_jax.kvcache.state import CacheSpec, Layout
from ferrum_jax.models.layout import CHECKPOINT, FUSED, SCANNED, layout_specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree
from ferrum_jax.ops import attention_cpu, native
from ferrum_jax.ops.quantised import activation_dtype
from ferrum_jax.sharding.devices import JaxDevice, default_dtype

PLATFORMS = ("cpu", "gpu", "tpu")
WIDEST_HEAD = 256
WIDEST_LATENT = 640
OWN = {"cpu": "cpu", "gpu": "triton", "tpu": "tpu"}  # each platform's own kernels

_log = logging.getLogger(__name__)


def kv_layout(attention: str, cfg: ModelConfig) -> Layout:
    """Returns the KV layout that a backend reads."""
    if cfg.latent is not None:
        return "latent_rows" if attention == "triton" else "latent"
    layouts: dict[str, Layout] = {"triton": "positions", "tpu": "interleaved"}
    return layouts.get(attention, "products")


def cache_spec(cfg: ModelConfig, *, num_blocks: int, block_size: int, dtype: str, attention: str = "xla") -> CacheSpec:
    """Returns the spec of a KV in which every layer keeps all positions, in the layout of the attention backend."""
    return CacheSpec(
        num_layers=cfg.num_hidden_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        dtype=dtype,
        layout=kv_layout(attention, cfg),
        attention=attention,
    )


def check_backend(attention: str | None, params: ParamTree, cfg: ModelConfig) -> None:
    """Raises UnsupportedError for the backends `cpu` and `tpu` if they cannot serve the model."""
    if attention == "cpu":
        attention_cpu.check()
    if attention in ("cpu", "tpu"):
        dtype = activation_dtype(params).name
        obstacle = _obstacle(attention, cfg, dtype, dtype, block_size=128, layout=None)
        if obstacle is not None:
            raise UnsupportedError(f"attention {attention!r}: {obstacle}")


def choose_attention(
    asked: str | None,
    cfg: ModelConfig,
    *,
    platform: str,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    layout: str | None = None,
) -> str:
    """Returns the backend asked for; if None, the platform's default, or `xla` if that cannot serve the model.

    `layout` is the layout of the parameters, `checkpoint` if None.

    Raises:
        ConfigError: the backend does not exist or does not run on this platform.
        UnsupportedError: the backend cannot serve these dtypes or sizes.
    """
    if asked is None:
        own = OWN.get(platform, "xla")
        return own if _obstacle(own, cfg, dtype, kv_dtype, block_size, layout) is None else "xla"
    if asked not in ATTENTIONS:
        raise ConfigError(f"attention is {safe_repr(asked)}, expected {', '.join(ATTENTIONS[:-1])} or {ATTENTIONS[-1]}")
    where = {"xla": PLATFORMS, "cpu": ("cpu",), "triton": ("gpu",), "tpu": ("tpu",)}[asked]
    if platform not in where:
        raise ConfigError(f"attention {asked!r} runs on {' and '.join(where)}, this device is a {platform}")
    obstacle = _obstacle(asked, cfg, dtype, kv_dtype, block_size, layout)
    if obstacle is not None:
        raise UnsupportedError(f"attention {asked!r}: {obstacle}; attention 'xla' serves every model")
    return asked


def settle_attention(
    settings: EngineConfig, cfg: ModelConfig, device: JaxDevice, *, warn: bool = False
) -> EngineConfig:
    """Sets `attention` to `xla` where the kernels for this GPU or TPU cannot serve a model; `warn` logs why."""
    obstacle = fallback_reason(settings, cfg, device)
    if obstacle is None:
        return settings
    if warn:
        _log.warning("%s", obstacle)
    return replace(settings, attention="xla")


def fallback_reason(settings: EngineConfig, cfg: ModelConfig, device: JaxDevice) -> str | None:
    """Returns why attention on this GPU or TPU falls back to XLA's code; None if it does not, or a backend is set."""
    own = OWN.get(device.platform)
    if settings.attention is not None or own not in ("triton", "tpu"):
        return None
    dtype = settings.dtype or default_dtype(device)
    block_size = settings.block_size or min(128, settings.kv_capacity or 128)
    obstacle = _obstacle(own, cfg, dtype, settings.kv_dtype or dtype, block_size, settings.layout)
    capability = str(getattr(device, "compute_capability", ""))  # "7.5"; of AMD's GPUs a name
    if (major := capability.partition(".")[0]).isdecimal() and int(major) < 8:
        obstacle = f"compute capability {capability}, it was made for 8.0 (Ampere) and later"
    if obstacle is None:
        return None
    return f"attention {own!r} cannot serve this: {obstacle}; XLA's code is used, which is many times slower"


def layout_for(cfg: ModelConfig, attention: str) -> str:
    """Returns the layout of parameters that is fastest on one device.

    CPU kernels read a layer's weights inside the stack of all layers: a loop over the layers then runs as fast as the
    unrolled layers, and compiles sooner. Without these kernels, and for latents' up-projections, XLA copies a layer's
    weights out of the stack in every step; with NEON also for products of more than 64 tokens, which was not measured.
    On a GPU, two products in the place of five take 5 to 7 % off a step of 1 and 32 rows (docs/benchmarks.md).
    """
    best = {"cpu": SCANNED, "triton": FUSED}.get(attention, CHECKPOINT)
    if cfg.latent is not None:
        return CHECKPOINT
    try:
        layout_specs(family(cfg).param_specs(cfg), cfg, best)
    except UnsupportedError:  # layers of several kinds
        return CHECKPOINT
    return best


def _obstacle(
    attention: str, cfg: ModelConfig, dtype: str, kv_dtype: str, block_size: int, layout: str | None
) -> str | None:
    """Returns why a backend cannot serve a model; None if it can."""
    if attention == "xla":
        return None
    if attention != "cpu" and layout == SCANNED and len(set(cfg.layer_windows)) > 1:
        return "the layers have different windows, which one loop over them (layout 'scanned') cannot pass to it"
    if attention == "cpu":
        return obstacle_of_kernels(cfg, dtype)
    if attention == "tpu" and cfg.latent is not None:
        return "the KV of this model holds latents"
    if attention == "tpu" and cfg.attention_sinks:
        return "the model has attention sinks, it has none"
    if attention == "tpu" and cfg.attn_logit_softcapping is not None:
        return f"attn_logit_softcapping is {cfg.attn_logit_softcapping}, it has no soft cap of scores"
    if attention == "triton" and importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return f"JAX {jax.__version__} has no Pallas for Triton"
    step = {"triton": 16, "tpu": 128}[attention]
    if cfg.latent is not None:
        name, width, widest = "a latent's width", cfg.latent.cached_dim, WIDEST_LATENT
    else:
        name, width, widest = "head_dim", cfg.head_dim, WIDEST_HEAD
    if width % step or width > widest:
        return f"{name} is {width}, supported are multiples of {step} up to {widest}"
    if attention == "triton":
        return f"kv_dtype is {kv_dtype}, supported are 16 and 32 bits" if jnp.dtype(kv_dtype).itemsize == 1 else None
    if dtype != "bfloat16":
        return f"dtype is {dtype}, supported is bfloat16"
    if kv_dtype != dtype:
        return f"kv_dtype is {kv_dtype} and dtype is {dtype}, supported are equal ones"
    heads, packed = cfg.num_key_value_heads, 4 // jnp.dtype(kv_dtype).itemsize
    if (2 * heads) % packed or not (2 * heads // packed in (1, 2, 4, 8) or (2 * heads // packed) % 8 == 0):
        return f"num_key_value_heads is {heads}, supported are 1, 2, 4 and multiples of 8"
    if block_size % 16:
        return f"block_size is {block_size}, supported are multiples of 16"
    return None


def obstacle_of_kernels(cfg: ModelConfig, dtype: str) -> str | None:
    """Returns why the CPU kernels cannot serve a model whose activations have a dtype; None if they can."""
    if isinstance(missing := native.library(), str):
        return f"there are no kernels: {missing}"
    if dtype != "float32":
        return f"dtype is {dtype}, the kernels compute in float32"
    width = cfg.head_dim if cfg.latent is None else cfg.latent.cached_dim
    return f"a head has {width} numbers, supported are up to {native.MOST_WIDTH}" if width > native.MOST_WIDTH else None
