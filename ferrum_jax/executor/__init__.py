"""Live sequences over compiled steps."""

from ferrum_jax.executor.runner import ModelRunner as ModelRunner
from ferrum_jax.executor.sizing import EnginePlan as EnginePlan
from ferrum_jax.executor.sizing import plan_engine as plan_engine
