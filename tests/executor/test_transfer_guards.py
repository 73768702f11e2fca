"""Every call under JAX's transfer guards, as trainers set them: what the engine copies, it means to copy."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from ferrum_jax.contract import ActiveLoraAdapter, DecodeRun
from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import emptied

PROMPT = list(range(1, 12))


def bind(runner: ModelRunner, folders: dict[str, str]) -> None:
    runner.set_lora_adapter_for_cache("adapted", ActiveLoraAdapter(name="one", path=folders["one"]))
    runner.prefill("adapted", PROMPT)


def fork_and_write(runner: ModelRunner, _: Any) -> None:
    runner.fork("a", "copy")
    runner.decode("copy", 5, len(PROMPT))


CALLS: dict[str, Callable[[ModelRunner, dict[str, str]], Any]] = {
    "prefill": lambda runner, _: runner.prefill("b", PROMPT),
    "decode": lambda runner, _: runner.decode("a", 3, len(PROMPT)),
    "verify": lambda runner, _: runner.forward_verify("a", [1, 2, 3]),
    "score": lambda runner, _: runner.score_batch([("a", [1, 2], [3, 4])]),
    "decode_n": lambda runner, _: runner.decode_n([DecodeRun(cache_id="a", token=1, pos=len(PROMPT), max_tokens=3)]),
    "fork": fork_and_write,
    "kv_cache": lambda runner, _: runner.kv_cache("a", 0),
    "load_lora": lambda runner, folders: runner.load_lora("one", folders["one"]),
    "bind": bind,
    "set_params": lambda runner, _: runner.set_params(runner.params, keep_sequences=True),
    "reset": lambda runner, _: runner.reset(),
}


@pytest.fixture
def runner(reusing: ModelRunner) -> Iterator[ModelRunner]:
    reusing.prefill("a", PROMPT)
    yield reusing
    emptied(reusing)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_passes_a_guard_of_its_thread(name: str, runner: ModelRunner, adapter_folders: dict[str, str]):
    with jax.transfer_guard("disallow"):
        CALLS[name](runner, adapter_folders)


def test_the_guard_would_have_refused(runner: ModelRunner, params: ParamTree):
    with jax.transfer_guard("disallow"), pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
        jax.jit(lambda leaf, x: leaf + x)(params["model"]["norm"]["weight"], 1.0)
