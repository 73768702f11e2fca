"""`ServerSettings`: the settings of one server."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ferrum_jax.contract.errors import ConfigError

MAX_BODY_BYTES = 16 << 20
MAX_WAITING = 256
MAX_SECONDS = 600.0
DRAIN_SECONDS = 30.0
MOST_SECONDS = 366 * 24 * 3600  # of any limit


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Names, limits and permissions of one server."""

    model: str = ""  # the served name; the model's own if empty
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # all requests but `/health` need one; empty: none does
    max_body_bytes: int = MAX_BODY_BYTES  # of a request
    max_prompt_tokens: int | None = None  # of one prompt; None: the KV capacity
    max_waiting: int = MAX_WAITING  # most answers that wait for a row; a request beyond is a 429
    max_seconds: float = MAX_SECONDS  # longest time of a request; its own `max_time` can only shorten it
    drain_seconds: float = DRAIN_SECONDS  # time for requests to end after the server is told to stop
    allow_origins: tuple[str, ...] = ()  # of browser pages that may call the server
    tool_parser: str = "auto"  # a parser's name, `none`, or `auto`: by the chat template
    adapters: Mapping[str, str] = field(default_factory=dict)  # folders by name, loaded when the server starts
    adapter_root: str = ""  # folder under which `/v1/load_lora_adapter` may read; empty: the endpoint refuses
    trainer_endpoints: bool = False  # whether `/pause`, `/update_weights` and similar endpoints exist
    quantize: str | None = None  # as the weights were loaded; `/update_weights` uses it again

    def __post_init__(self):
        limits = {"max_body_bytes": 1, "max_waiting": 0}
        if self.max_prompt_tokens is not None:
            limits["max_prompt_tokens"] = 1
        for name, least in limits.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least {least}")
        if not 0 < self.max_seconds <= MOST_SECONDS:
            raise ConfigError(f"max_seconds is {self.max_seconds}, expected more than 0, at most {MOST_SECONDS}")
        if not 0 <= self.drain_seconds <= MOST_SECONDS:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}, expected 0 to {MOST_SECONDS}")
        if any(not key or not key.isascii() for key in self.api_keys):
            raise ConfigError("an API key is empty or not ASCII, no client could send it")
