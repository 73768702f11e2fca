"""The `adapter_config.json` of a LoRA in PEFT's format; settings that are not implemented are refused.

Names are matched as in PEFT 0.21 (`tuners/tuners_utils.py`, `utils/other.py`). Patterns run unchecked, and a regular
expression can take very long: load adapters only from sources that you trust for weights.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ferrum_jax.config.checks import check_integer, check_number
from ferrum_jax.contract.checks import check_flag
from ferrum_jax.contract.errors import ConfigError, UnsupportedError

_READ = (
    "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "peft_type", "task_type", "bias", "init_lora_weights",
)  # fmt: skip
_WITHOUT_EFFECT = (  # settings without effect on inference with the implemented projections
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "peft_version",
    "megatron_core", "qalora_group_size", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying",
)  # fmt: skip
_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")  # initialisations that do not change the base weights

Names = tuple[str, ...]
Patterns = tuple[tuple[re.Pattern[str], Any], ...]


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """The projections that an adapter changes, and its rank and scale at each."""

    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: Names | re.Pattern[str]
    exclude_modules: Names | re.Pattern[str]
    layers_to_transform: tuple[int, ...]  # empty: all layers
    layers_pattern: tuple[re.Pattern[str], ...]  # the group `layer` is the layer's number
    rank_pattern: Patterns
    alpha_pattern: Patterns

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Self:
        """Reads the fields of an `adapter_config.json`.

        Raises:
            UnsupportedError: a setting is not implemented.
            ConfigError: a field is missing or has the wrong type.
        """
        _check_supported(config)
        targets, layers = config.get("target_modules"), config.get("layers_to_transform")
        if targets is None:
            raise ConfigError("target_modules is missing, expected the names that PEFT saves")
        if isinstance(targets, str) and layers is not None:
            raise ConfigError(f"layers_to_transform is {layers!r}, expected null where target_modules is a pattern")
        if isinstance(targets, str) and targets.lower() == "all-linear":
            targets = r".*\.layers\..*"
        rslora = config.get("use_rslora")
        return cls(
            r=check_integer("r", config.get("r"), 1),
            lora_alpha=check_number("lora_alpha", config.get("lora_alpha"), above=None),
            use_rslora=rslora is not None and check_flag("use_rslora", rslora, ConfigError),
            target_modules=_names_or_pattern("target_modules", targets),
            exclude_modules=_names_or_pattern("exclude_modules", config.get("exclude_modules") or []),
            layers_to_transform=_layers(layers),
            layers_pattern=_layer_patterns(config.get("layers_pattern") or [r"[^.]*"]),
            rank_pattern=_patterns(config, "rank_pattern", lambda name, value: check_integer(name, value, 1)),
            alpha_pattern=_patterns(config, "alpha_pattern", lambda name, value: check_number(name, value, above=None)),
        )

    def is_target(self, module: str) -> bool:
        """Whether the adapter changes a module such as `model.layers.3.self_attn.q_proj`."""
        if _is_named(self.exclude_modules, module) or not _is_named(self.target_modules, module):
            return False
        if not self.layers_to_transform or isinstance(self.target_modules, re.Pattern) or module in self.target_modules:
            return True
        found = next((match for pattern in self.layers_pattern if (match := pattern.match(module))), None)
        return found is not None and int(found["layer"] or -1) in self.layers_to_transform

    def rank_of(self, module: str) -> int:
        """Returns the rank of the adapter at a module."""
        return _looked_up(self.rank_pattern, module, self.r)

    def scale_of(self, module: str) -> float:
        """Returns the factor on the adapter's delta at a module: alpha / r, or alpha / sqrt(r) if rank-stabilised.

        Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA".
        """
        rank = self.rank_of(module)
        return _looked_up(self.alpha_pattern, module, self.lora_alpha) / (rank**0.5 if self.use_rslora else rank)


def _check_supported(config: Mapping[str, Any]) -> None:
    kind, task, bias = config.get("peft_type"), config.get("task_type"), config.get("bias", "none")
    if kind != "LORA":
        raise UnsupportedError(f"peft_type {kind!r} is not implemented, only LORA is")
    if task not in (None, "CAUSAL_LM"):
        raise UnsupportedError(f"task_type {task!r} is not implemented, only CAUSAL_LM is")
    if bias != "none":
        raise UnsupportedError(f"bias {bias!r} is not implemented, only 'none' is")
    start = config.get("init_lora_weights")
    if not isinstance(start, bool) and start is not None and str(start).lower() not in _KEEP_THE_BASE:
        raise UnsupportedError(
            f"init_lora_weights {start!r} may change the base weights, which is not implemented: have PEFT convert the "
            "adapter as it saves it (path_initial_model_for_weight_conversion)"
        )
    for name, value in config.items():
        if name not in _READ and name not in _WITHOUT_EFFECT and value:
            raise UnsupportedError(f"{name} = {value!r} is not implemented")


def _is_named(names: Names | re.Pattern[str], module: str) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _looked_up(patterns: Patterns, module: str, default: Any) -> Any:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _layers(value: Any) -> tuple[int, ...]:
    layers = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(check_integer("layers_to_transform", layer) for layer in layers)


def _layer_patterns(value: Any) -> tuple[re.Pattern[str], ...]:
    names = _names("layers_pattern", [value] if isinstance(value, str) else value)
    return tuple(_pattern("layers_pattern", rf"(?:^|.*?\.){name}\.(?P<layer>\d+)\.") for name in names)


def _names(name: str, value: Any) -> Names:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ConfigError(f"{name} is {value!r}, expected a list of names")
    return tuple(value)


def _names_or_pattern(name: str, value: Any) -> Names | re.Pattern[str]:
    return _pattern(name, value) if isinstance(value, str) else _names(name, value)


def _patterns(config: Mapping[str, Any], name: str, read: Callable[[str, Any], Any]) -> Patterns:
    if not isinstance(value := config.get(name) or {}, dict):
        raise ConfigError(f"{name} is {value!r}, expected an object of patterns")
    return tuple((_pattern(name, rf"(.*\.)?({key})$"), read(f"{name}[{key!r}]", entry)) for key, entry in value.items())


def _pattern(name: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError, Warning) as problem:  # Python warns of ambiguous patterns
        raise ConfigError(f"{name}: {text!r} is no regular expression: {problem}") from None
