"""A functional JAX/XLA engine for decoder-only language models, compiled ahead of time.

The contract's types and errors are here at once; what needs JAX is imported when it is first asked for.
"""

import importlib
import time
from typing import TYPE_CHECKING, Any

from ferrum_jax import contract as contract
from ferrum_jax import errors as errors
from ferrum_jax.contract import *  # noqa: F403
from ferrum_jax.contract import IOError as IOError
from ferrum_jax.contract import TimeoutError as TimeoutError

if TYPE_CHECKING:
    from ferrum_jax import models as models
    from ferrum_jax.config import EngineConfig as EngineConfig
    from ferrum_jax.config import ModelConfig as ModelConfig
    from ferrum_jax.conversion import convert as convert
    from ferrum_jax.executor.from_params import from_params as from_params
    from ferrum_jax.executor.interventions import Interventions as Interventions
    from ferrum_jax.executor.llm_executor.executor import LlmExecutor as LlmExecutor
    from ferrum_jax.executor.llm_executor.registry import LlmExecutorRegistry as LlmExecutorRegistry
    from ferrum_jax.executor.runner import ModelRunner as ModelRunner
    from ferrum_jax.factory import LlmExecutorFactory as LlmExecutorFactory
    from ferrum_jax.generate.async_llm import AsyncLLM as AsyncLLM
    from ferrum_jax.generate.llm import LLM as LLM
    from ferrum_jax.generate.params import SamplingParams as SamplingParams
    from ferrum_jax.generate.rollout import generate_fn as generate_fn
    from ferrum_jax.generate.rollout import kv_spec as kv_spec
    from ferrum_jax.generate.speculation import Speculation as Speculation
    from ferrum_jax.generate.structured import Structured as Structured
    from ferrum_jax.loading import load as load
    from ferrum_jax.loading import load_params as load_params
    from ferrum_jax.weights.foreign import from_hf_names as from_hf_names

__version__ = "0.1.0"
IMPORTED_AT = time.time()  # seconds since 1970

_LAZY = {
    "EngineConfig": "ferrum_jax.config",
    "ModelConfig": "ferrum_jax.config",
    "convert": "ferrum_jax.conversion",
    "Interventions": "ferrum_jax.executor.interventions",
    "LlmExecutor": "ferrum_jax.executor.llm_executor.executor",
    "LlmExecutorFactory": "ferrum_jax.factory",
    "LlmExecutorRegistry": "ferrum_jax.executor.llm_executor.registry",
    "ModelRunner": "ferrum_jax.executor.runner",
    "AsyncLLM": "ferrum_jax.generate.async_llm",
    "LLM": "ferrum_jax.generate.llm",
    "from_hf_names": "ferrum_jax.weights.foreign",
    "from_params": "ferrum_jax.executor.from_params",
    "generate_fn": "ferrum_jax.generate.rollout",
    "kv_spec": "ferrum_jax.generate.rollout",
    "SamplingParams": "ferrum_jax.generate.params",
    "Speculation": "ferrum_jax.generate.speculation",
    "Structured": "ferrum_jax.generate.structured",
    "load": "ferrum_jax.loading",
    "load_params": "ferrum_jax.loading",
    "models": "ferrum_jax.models",
}
__all__ = [
    "LLM", "AsyncLLM", "EngineConfig", "Interventions", "LlmExecutor", "LlmExecutorFactory", "LlmExecutorRegistry",
    "ModelConfig", "ModelRunner", "SamplingParams", "Speculation", "Structured", "contract", "convert", "errors",
    "from_hf_names", "from_params", "generate_fn", "kv_spec", "load", "load_params", "models",
]  # fmt: skip
__all__ += contract.__all__


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ferrum_jax' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = module if name == "models" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
