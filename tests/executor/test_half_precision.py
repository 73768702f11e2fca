"""Steps in bfloat16 and float16 give the answers of float32 but for rounding, whichever way the tokens come."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import models
from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.config import ModelConfig
from ferrum_jax.executor import ModelRunner, plan_engine
from ferrum_jax.executor.batch import SampledToken, ScheduledRow
from ferrum_jax.models.specs import ParamTree
from tests import tiny
from tests.executor.answers import expect_choice
from tests.executor.conftest import CFG, DEVICE, ENGINE, Oracle, poison
from tests.tiers import by_default

MIXTRAL = tiny.CONFIGS["mixtral"] | {"num_hidden_layers": 1, "vocab_size": CFG.vocab_size}
END, CUT = 22, 13  # tokens
SMALL = replace(ENGINE, max_seqs=2, decode_rows=(2,), query_blocks=(1,), block_tokens=END)


@pytest.mark.parametrize(
    ("name", "dtype"),
    by_default(product(("qwen3", "mixtral"), ("bfloat16", "float16")), ("qwen3", "bfloat16")),
)
def test_every_kind_of_step_gives_the_logits_of_float32_but_for_rounding(
    name: str, dtype: str, params: ParamTree, oracle_of: Callable[[ParamTree], Oracle]
):
    # No router is near a tie for these tokens: rounding would choose another expert there.
    tokens = np.random.RandomState(4).randint(0, CFG.vocab_size, END + 2).tolist()
    cfg, given = CFG, params
    if name == "mixtral":
        cfg, given = ModelConfig.from_hf(MIXTRAL), tiny.tiny_params(MIXTRAL)
    narrow = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.dtype(dtype)), given)  # by NumPy: nothing compiles
    rounded = jax.device_put(narrow, DEVICE)
    widened = jax.tree.map(lambda leaf: leaf.astype(np.float32), narrow)
    if name == "mixtral":
        exact = np.asarray(jax.jit(models.forward, static_argnums=2)(widened, jnp.asarray([tokens]), cfg)[0])
    else:
        exact = oracle_of(widened)(tokens)
    # A layer rounds its activations some ten times, each time by up to eps / 2. In two layers that is a random walk of
    # twenty such steps, 2 eps; twice that is for the largest error of all logits.
    tolerance = 4 * float(jnp.finfo(dtype).eps) * np.abs(exact).max()

    def check(found: np.ndarray | None, expected: np.ndarray) -> None:
        assert found is not None
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)

    plan = plan_engine(replace(SMALL, dtype=dtype), cfg, platform=DEVICE.platform, free_bytes=10**9)
    with ModelRunner(rounded, cfg, plan, device=DEVICE) as runner:
        poison(runner)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(runner._device.kv)} == {dtype}
        whole = runner.prefill("a", tokens[:END])  # in one query block; "b" takes the same tokens in two
        check(whole, exact[END - 1])
        check(runner.prefill("b", tokens[:CUT]), exact[CUT - 1])
        mixed = runner.unified_forward([("a", tokens[END : END + 1], END, True), ("b", tokens[CUT:END], CUT, True)])
        for found, expected in zip(mixed, (exact[END], exact[END - 1]), strict=True):
            check(found, expected)
        check(mixed[1], whole)
        check(runner.decode("b", tokens[END], END), exact[END])
        settings = SlotSettings(temperature=0.8, seed=3, num_logprobs=2)
        row = ScheduledRow("a", np.array(tokens[-1:], np.int32), END + 1, SampledToken(settings))
        (chosen,) = runner.execute([row]).result()
        runner.truncate_kv("a", END + 1)
        both = runner.decode_batch([("a", tokens[-1], END + 1), ("b", tokens[-1], END + 1)])
        for found in both:
            check(found, exact[END + 1])
        expect_choice(chosen, both[0], settings, [], END + 2)
