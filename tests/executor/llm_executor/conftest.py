"""One small runner for all tests of the executor: few compiled steps, ready at once."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ferrum_jax.executor import ModelRunner
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import ENGINE, make_runner

SMALL = replace(
    ENGINE, decode_rows=(4,), query_blocks=(3,), block_tokens=8, max_step_tokens=24, prefix_cache=True,
    max_loras=2, max_lora_rank=4,
)  # fmt: skip


@pytest.fixture(scope="session")
def shared_runner(params: ParamTree) -> Iterator[ModelRunner]:
    with make_runner(params, SMALL) as runner:
        yield runner
