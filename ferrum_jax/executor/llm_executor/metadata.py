"""The keys of a request's metadata that an executor understands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferrum_jax.contract.checks import checked_int
from ferrum_jax.contract.errors import RequestValidationError, shown
from ferrum_jax.contract.slots import ActiveLoraAdapter

PREFIX = "ferrum_"
LORA_ADAPTER = "ferrum_lora_adapter"
LORA_PATH = "ferrum_lora_path"
FULL_LOGITS = "ferrum_require_full_logits"
CAPACITY_HINT = "ferrum_kv_capacity_hint"
ADMISSION_TARGET = "ferrum_kv_admission_target_len"
HIDDEN_LAYERS = "ferrum_hidden_layers"
ATTENTION_LAYERS = "ferrum_attention_layers"
KEYS = (LORA_ADAPTER, LORA_PATH, FULL_LOGITS, CAPACITY_HINT, ADMISSION_TARGET, HIDDEN_LAYERS, ATTENTION_LAYERS)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the metadata asks for."""

    adapter: ActiveLoraAdapter | None = None  # to be bound before the first token
    full_logits: bool = False  # of every position in a prefill; no shortcut in a decode
    capacity_hint: int | None = None  # positions the sequence may reach
    admission_target: int | None = None  # positions that must fit before anything runs
    hidden_layers: tuple[int, ...] = ()  # whose hidden states a prefill gives, as `DecoderOnlyLLM.watch` counts them
    attention_layers: tuple[int, ...] = ()  # whose attention weights a prefill gives

    @property
    def is_watched(self) -> bool:
        """True if it asks for anything of a layer."""
        return bool(self.hidden_layers or self.attention_layers)


def read_options(label: str, metadata: Any) -> Options:
    """Reads the keys that begin with `ferrum_`; all others are the caller's own. None is as good as absent.

    Raises:
        RequestValidationError: an unknown key, a value of the wrong type, or one half of a LoRA adapter.
    """
    if not isinstance(metadata, Mapping):
        raise RequestValidationError(f"{label}: metadata is a {type(metadata).__name__}, expected a mapping")
    ours = {key: value for key, value in metadata.items() if isinstance(key, str) and key.startswith(PREFIX)}
    unknown = sorted(ours.keys() - set(KEYS))
    if unknown:
        raise RequestValidationError(f"{label}: metadata keys {unknown} are unknown, known are {', '.join(KEYS)}")
    full_logits = ours.get(FULL_LOGITS)
    if not isinstance(full_logits, bool | None):
        raise RequestValidationError(f"{label}: {FULL_LOGITS} is {shown(full_logits)}, expected True or False")
    return Options(
        adapter=_adapter(label, ours.get(LORA_ADAPTER), ours.get(LORA_PATH)),
        full_logits=bool(full_logits),
        capacity_hint=_positions(label, CAPACITY_HINT, ours),
        admission_target=_positions(label, ADMISSION_TARGET, ours),
        hidden_layers=_layers(label, HIDDEN_LAYERS, ours),
        attention_layers=_layers(label, ATTENTION_LAYERS, ours),
    )


def _adapter(label: str, name: Any, path: Any) -> ActiveLoraAdapter | None:
    if name is None and path is None:
        return None
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise RequestValidationError(
            f"{label}: {LORA_ADAPTER} is {shown(name)} and {LORA_PATH} is {shown(path)}, expected both or neither, "
            "as strings"
        )
    return ActiveLoraAdapter(name=name, path=path)


def _positions(label: str, key: str, metadata: Mapping[str, Any]) -> int | None:
    value = metadata.get(key)
    return None if value is None else checked_int(f"{label}: {key}", value, 0)


def _layers(label: str, key: str, metadata: Mapping[str, Any]) -> tuple[int, ...]:
    given = metadata.get(key)
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise RequestValidationError(f"{label}: {key} is {shown(given)}, expected a list of layers")
    return tuple(checked_int(f"{label}: {key}", layer, 0) for layer in given)
