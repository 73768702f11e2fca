"""Settings: a model's architecture (`ModelConfig`), and how the engine runs it (`EngineConfig`)."""

from ferrum_jax.config.components import ExpertsConfig as ExpertsConfig
from ferrum_jax.config.components import LatentConfig as LatentConfig
from ferrum_jax.config.components import RopeScaling as RopeScaling
from ferrum_jax.config.engine import ATTENTIONS as ATTENTIONS
from ferrum_jax.config.engine import DTYPES as DTYPES
from ferrum_jax.config.engine import ENVIRONMENT as ENVIRONMENT
from ferrum_jax.config.engine import LAYOUTS as LAYOUTS
from ferrum_jax.config.engine import QUANTISED as QUANTISED
from ferrum_jax.config.engine import EngineConfig as EngineConfig
from ferrum_jax.config.families import FAMILIES as FAMILIES
from ferrum_jax.config.model import ModelConfig as ModelConfig
from ferrum_jax.config.model import check_model_config as check_model_config
