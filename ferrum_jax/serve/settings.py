"""`ServerSettings`: the settings of one server."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ferrum_jax.config.checks import check_integer, check_number
from ferrum_jax.contract.checks import check_flag
from ferrum_jax.contract.errors import ConfigError, safe_repr
from ferrum_jax.serve.tools.choice import choose_format

MOST_SECONDS = 366 * 24 * 3600  # of any limit


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Names, limits and permissions of one server."""

    model: str = ""  # the served name; the model's own if empty
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # all requests but `/health` need one; empty: none does
    max_body_bytes: int = 16 << 20  # of a request
    max_prompt_tokens: int | None = None  # of one prompt; None: the KV capacity
    max_waiting: int = 256  # most answers that wait for a row; a request beyond is a 429
    max_seconds: float = 600.0  # longest time of a request; its own `max_time` can only shorten it
    drain_seconds: float = 30.0  # time for requests to end after the server is told to stop
    allow_origins: tuple[str, ...] = ()  # of browser pages that may call the server
    generation_config: str = "auto"  # `auto`: the model's files give the defaults of sampling; `none`: they do not
    tool_parser: str = "auto"  # a parser's name, `none`, or `auto`: by the chat template
    adapters: Mapping[str, str] = field(default_factory=dict)  # folders by name, loaded when the server starts
    adapter_root: str = ""  # folder under which `/v1/load_lora_adapter` may read; empty: the endpoint refuses
    trainer_endpoints: bool = False  # whether `/pause`, `/update_weights` and similar endpoints exist
    quantize: str | None = None  # as the weights were loaded; `/update_weights` uses it again

    def __post_init__(self):
        check_integer("max_body_bytes", self.max_body_bytes, 1, 2**63 - 1)
        check_integer("max_waiting", self.max_waiting)
        if self.max_prompt_tokens is not None:
            check_integer("max_prompt_tokens", self.max_prompt_tokens, 1)
        if self.generation_config not in ("auto", "none"):
            raise ConfigError(f"generation_config is {safe_repr(self.generation_config)}, expected 'auto' or 'none'")
        check_flag("trainer_endpoints", self.trainer_endpoints, ConfigError)
        for name in ("max_seconds", "drain_seconds"):
            check_number(name, getattr(self, name), above=None)
        for name in ("model", "tool_parser", "adapter_root"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} is {safe_repr(getattr(self, name))}, expected a text")
        if self.adapter_root and not os.path.isdir(os.path.expanduser(self.adapter_root)):
            raise ConfigError(f"adapter_root {self.adapter_root} is no folder")
        for name in ("api_keys", "allow_origins"):
            texts = getattr(self, name)
            if not isinstance(texts, (tuple, list)) or not all(isinstance(one, str) for one in texts):
                raise ConfigError(f"{name} is a {type(texts).__name__}, expected a tuple or a list of texts")
        if not all(self.allow_origins):
            raise ConfigError("allow_origins has an empty text, expected origins such as https://example.org")
        choose_format(self.tool_parser, None)
        if not isinstance(self.adapters, Mapping):
            raise ConfigError(f"adapters is a {type(self.adapters).__name__}, expected folders by name")
        if not 0 < self.max_seconds <= MOST_SECONDS:
            raise ConfigError(f"max_seconds is {self.max_seconds}, expected more than 0, at most {MOST_SECONDS}")
        if not 0 <= self.drain_seconds <= MOST_SECONDS:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}, expected 0 to {MOST_SECONDS}")
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty, not ASCII, or has spaces around it: no client could send it")
