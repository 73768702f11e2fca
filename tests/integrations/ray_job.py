"""What tests/integrations/test_ray.py has a process of its own do: a model on two actors of Ray, which answer as one.

Run as `python -m tests.integrations.ray_job MODEL`; the last line is JSON of what was found.
"""

# pyright: reportMissingImports=false
import json
import sys
import threading
import time
from typing import Any

import ray

from ferrum_jax import SamplingParams
from ferrum_jax.contract.errors import CancelledError, FerrumError
from ferrum_jax.integrations.ray import RayLLM

PROMPTS = [[3, 5, 7], [2, 4, 6, 8, 10], list(range(20))]
WANTED = SamplingParams(max_tokens=8, temperature=0.8, seed=5)
SETTINGS: dict[str, Any] = {"max_seqs": 4, "kv_capacity": 64, "artifacts": False}


def refused(call: Any) -> str:
    """What a call is refused with."""
    try:
        call()
    except FerrumError as problem:
        return f"{type(problem).__name__}: {problem}"
    raise AssertionError("it was not refused")


def main() -> None:
    path, found = sys.argv[1], dict[str, Any]()
    environment = {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    own: dict[str, Any] = {"mesh": {"model": 4}, "num_processes": 2, "environment": environment, **SETTINGS}
    found["no cluster"] = refused(lambda: RayLLM(path, **own))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    found["nowhere"] = refused(lambda: RayLLM(f"{path}/nowhere", **own))
    found["crowded"] = refused(lambda: RayLLM(path, **{**own, "resources": {"CPU": 2}, "start_seconds": 2}))
    found["wrong resources"] = refused(lambda: RayLLM(path, **{**own, "resources": {"CPU": -1}}))
    found["wrong environment"] = refused(lambda: RayLLM(path, **{**own, "environment": {"A": 1}}))
    found["no mesh"] = refused(lambda: RayLLM(path, **{**own, "mesh": None}))
    with RayLLM(path, **own) as llm:
        texts: dict[int, list[int]] = {}

        def ask(at: int) -> None:
            texts[at] = llm.generate([PROMPTS[at]], WANTED)[0].token_ids

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found["tokens"] = [texts[at] for at in range(len(PROMPTS))]
        found["scores"] = llm.score([PROMPTS[0]], [[9, 11]])[0].logprobs
        found["wrong"] = refused(lambda: llm.generate([[10**6]], WANTED))
        processes = llm._processes
    llm.close()
    try:
        llm.generate([PROMPTS[0]])
    except CancelledError as problem:
        found["closed"] = str(problem)
    with RayLLM(path, **own) as llm:  # the resources are free again
        processes = llm._processes
        ray.kill(processes[1])
        found["killed"] = refused(lambda: [llm.generate([PROMPTS[0]], WANTED) for _ in range(200)])
        ray.kill(processes[0])
        for _ in range(300):  # it answers until it is gone
            found["gone"] = refused(lambda: llm.generate([PROMPTS[0]], WANTED))
            if "only reset() helps" not in found["gone"]:
                break
            time.sleep(0.1)
    llm = RayLLM(path, **{**own, "mesh": {"model": 2}, "num_processes": 1})
    found["one process"] = [llm.generate([prompt], WANTED)[0].token_ids for prompt in PROMPTS]
    ray.shutdown()
    llm.close()
    found["started again"] = ray.is_initialized()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
