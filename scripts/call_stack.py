"""Prints the package's own frames between a public call and the executable, for `decode` and for one `LLM` step.

Run as `python -m scripts.call_stack`.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import ferrum_jax
from ferrum_jax import LLM, EngineConfig, SamplingParams, models

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
HERE = Path(ferrum_jax.__file__).parent


def frames_of(call: Callable[[], Any]) -> list[str]:
    """Runs a call; returns the package's frames above the last step that it began, outermost first."""
    found: list[str] = []
    run = jax.stages.Compiled.__call__

    def recorded(self: jax.stages.Compiled, *args: Any, **named: Any) -> Any:
        stack = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(HERE))]
        if len(args) > 3:  # a step, not the sampler
            found[:] = [f"{Path(frame.filename).relative_to(HERE)}:{frame.lineno} {frame.name}" for frame in stack]
        return run(self, *args, **named)

    jax.stages.Compiled.__call__ = recorded
    try:
        call()
    finally:
        jax.stages.Compiled.__call__ = run
    return found


def main() -> None:
    cfg = models.config_from_hf(CONFIG)
    params = models.init_params(cfg, jax.random.key(0))
    engine = EngineConfig(max_seqs=2, kv_capacity=32, block_size=8, decode_rows=(1,), query_blocks=(1,), block_tokens=8)
    with ferrum_jax.from_params(params, cfg, engine=engine) as runner:
        runner.prefill("a", [1, 2, 3])
        llm = LLM.from_model(runner, max_rows=1)
        calls: dict[str, Callable[[], Any]] = {
            "runner.decode": lambda: runner.decode("a", 4, 3),
            "a step of LLM.generate": lambda: llm.generate([[5, 6]], SamplingParams(max_tokens=3)),
        }
        for name, call in calls.items():
            frames = frames_of(call)
            print(f"{name}: {len(frames)} frames")
            print(*(f"  {frame}" for frame in frames), sep="\n")


if __name__ == "__main__":
    main()
