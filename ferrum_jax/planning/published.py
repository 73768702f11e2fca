"""Published configurations of models too large to ship, by name.

Each is the `config.json` of the model it is named after, without what says nothing about its shapes.
"""

import json
from importlib.resources import files
from typing import Any

_TEXT = files("ferrum_jax.planning").joinpath("published.json").read_text("utf-8")

CONFIGURATIONS: dict[str, dict[str, Any]] = json.loads(_TEXT)
