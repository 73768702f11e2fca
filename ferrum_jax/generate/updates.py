"""Changes of the weights of a model or an adapter while requests run."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import jax
import numpy as np

from ferrum_jax.contract.errors import RequestValidationError, UnsupportedError, safe_repr
from ferrum_jax.contract.llm import DecoderOnlyLLM
from ferrum_jax.executor.runner import ModelRunner
from ferrum_jax.generate.request import Request
from ferrum_jax.models.specs import NewParams

LivePolicy = Literal["wait", "abort", "keep", "recompute"]


@dataclass(eq=False)
class Update:
    """A change of weights, and what happens to the requests that run under the old ones.

    `wait`: they end first, and requests that have not begun wait for the new weights. `abort`: they end with the answer
    so far. `keep`: they go on with the KV of the old weights. `recompute`: they go on, and their KV is recomputed under
    the new weights.
    """

    install: Callable[[Collection[str]], None]  # sets the weights, given sequences to keep
    live: LivePolicy
    adapter: str | None = None  # name of the adapter that changes; None: the model itself changes
    done: Future[int] = field(default_factory=Future)

    def __post_init__(self):
        if self.live not in get_args(LivePolicy):
            raise RequestValidationError(f"live is {safe_repr(self.live)}, expected one of {get_args(LivePolicy)}")

    def apply(self, kept: Collection[str]) -> bool:
        """Sets the weights; returns False if the update was cancelled, or if it failed, which `done` then has."""
        if not self.done.set_running_or_notify_cancel():
            return False
        try:
            self.install(kept)
        except BaseException as problem:  # noqa: BLE001  the update's caller gets it, a SystemExit of its function too
            self.done.set_exception(problem)
            del self  # the error knows this frame, and would keep itself and the refused weights alive
            return False
        return True

    def concerns(self, request: Request) -> bool:
        """True if a request uses the weights that change."""
        return self.adapter is None or (request.adapter is not None and request.adapter.name == self.adapter)

    def holds_back(self, request: Request) -> bool:
        """True if a request must not begin before the update."""
        return self.live == "wait" and self.concerns(request) and not (request.has_sampled_here or request.scores)


def params_update(model: DecoderOnlyLLM, params: NewParams, live: LivePolicy) -> Update:
    """Returns the update that sets a model's weights; raises UnsupportedError unless it is a `ModelRunner`."""
    runner = _runner(model)
    return Update(lambda kept: runner.set_params(params, keep_sequences=kept), live)


def lora_update(
    model: DecoderOnlyLLM, name: str, tree: Any, live: LivePolicy, *, scale: float = 1.0, index: int = 0
) -> Update:
    """Returns the update that sets an adapter's arrays; raises as `params_update`.

    NumPy arrays are copied now, as their owner may write to them before the update comes.
    """
    runner = _runner(model)
    tree = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)
    call = partial(runner.set_lora, name, tree, scale=scale, index=index)
    return Update(lambda kept: call(keep_sequences=kept), live, adapter=name)


def _runner(model: DecoderOnlyLLM) -> ModelRunner:
    if not isinstance(model, ModelRunner):
        raise UnsupportedError(f"setting weights needs a ModelRunner, this LLM runs a {type(model).__name__}")
    return model
