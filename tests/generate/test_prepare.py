"""`LLM.prepare` compiles what answering a prompt alone needs, so that nothing is compiled while it is answered."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from ferrum_jax import LLM, SamplingParams, Speculation
from ferrum_jax.models.specs import ParamTree
from tests.executor.conftest import make_runner
from tests.generate.conftest import ENGINE
from tests.tiers import by_default

MORE: list[dict[str, int]] = [{}, {"multi_step_tokens": 3}, {"spec_tokens": 3}]
PROMPT, PARAMS = [3, 1, 4, 3, 1], SamplingParams(max_tokens=14)


def test_a_prompt_is_prepared_after_what_was_aborted_has_left_its_slot(params: ParamTree):
    with make_runner(params, replace(ENGINE, max_seqs=1, decode_rows=(1,), query_blocks=(1,))) as runner:
        llm = LLM.from_model(runner)
        llm.prepare(PROMPT, PARAMS)
        execute, is_slow = runner.execute, threading.Event()

        def slow(batch: Any) -> Any:
            pending = execute(batch)
            result = pending.result

            def wait() -> Any:
                with runner._life.lock:
                    is_slow.set()
                    time.sleep(0.3)  # as a step of a large model takes
                    return result()

            pending.result = wait
            return pending

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "execute", slow)
            request = llm.request(PROMPT, PARAMS)
            llm.engine.submit(request)
            is_slow.wait()
            llm.engine.abort(request)
            llm.prepare([3, 2, 1], PARAMS)
        assert runner.kv_len(request.cache_id) is None


@pytest.mark.parametrize("more", by_default(MORE, MORE[1]))
def test_nothing_is_compiled_after_a_prompt_is_prepared(
    more: dict[str, Any], repeating_params: ParamTree, compiles: list[str]
):
    speculation = Speculation(num_tokens=3) if "spec_tokens" in more else None
    with make_runner(repeating_params, replace(ENGINE, **more), strict=True) as runner:
        llm = LLM.from_model(runner, speculation=speculation)
        llm.prepare(PROMPT, PARAMS)
        compiles.clear()
        (out,) = llm.generate([PROMPT], PARAMS)
        assert len(out.token_ids) == 14
        assert bool(out.drafted) == (speculation is not None)
        assert compiles == []
