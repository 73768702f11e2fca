"""A runner on a device that is not JAX's default one, in a process that has two."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import jax, json, sys
    from tests.executor.conftest import CFG, ENGINE
    from dataclasses import replace
    from ferrum_jax import models
    from ferrum_jax.contract import ActiveLoraAdapter, GreedyArgmax
    from ferrum_jax.executor import ModelRunner, plan_engine

    second = jax.devices()[1]
    params = jax.device_put(models.init_params(CFG, jax.random.key(0)), second)
    engine = replace(ENGINE, max_loras=1, max_lora_rank=4, prefix_cache=True, decode_rows=(2,), block_tokens=8)
    plan = plan_engine(engine, CFG, platform="cpu", free_bytes=10**9)
    with ModelRunner(params, CFG, plan, device=second) as runner:
        runner.set_lora_adapter_for_cache("a", ActiveLoraAdapter(name="one", path=sys.argv[1]))
        runner.prefill("a", [1, 2, 3])
        runner.fork("a", "b")
        ids = runner.decode_batch_with_logits_policy([("a", 4, 3), ("b", 5, 3)], [GreedyArgmax(), GreedyArgmax()])
        assert all(type(one) is int for one in ids), ids
        assert runner.kv_cache("a", 1)[0].shape == (4, 2, 10)
        assert {leaf.device for leaf in jax.tree.leaves(runner._adapters.stacks)} == {second}
        assert {leaf.device for leaf in jax.tree.leaves(runner._device.kv)} == {second}
    print("done")
"""


@pytest.mark.slow
def test_adapters_policies_and_copies_run_where_the_model_is(adapter_folders: dict[str, str]):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), adapter_folders["one"]]
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "done\n", done.stderr
