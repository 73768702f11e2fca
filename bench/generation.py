"""`LLM.generate` beside the programs that it runs: what a token costs over what the device needs for it."""

from dataclasses import dataclass

from bench import models
from bench.bare import BareStep
from bench.timing import Contestant, alternate
from ferrum_jax import LLM, SamplingParams
from ferrum_jax.compile.sampler import SlotSettings
from ferrum_jax.executor.runner import ModelRunner

BURST = 40  # bare calls in a row


@dataclass(frozen=True)
class Generation:
    """Microseconds of one decode step of all rows."""

    rows: int
    call_us: float  # of `LLM.generate`: what one more token of every row takes
    bare_us: float  # of the compiled step alone
    sampled_us: float  # of the compiled step and the sampler after it

    @property
    def rate(self) -> float:
        """Tokens a second of `LLM.generate`, prompts apart."""
        return self.rows / self.call_us * 1e6


def measure_generation(
    runner: ModelRunner, rows: int, *, context: int, tokens: int, temperature: float, rounds: int
) -> Generation:
    """Times answers of `tokens` tokens and of one token in turn; a step is the difference over the steps between.

    The bare programs run in the middle of the answers' contexts, each step waited for.
    """
    llm = LLM.from_model(runner, max_rows=rows, chunk_tokens=runner.plan.buckets.max_step_tokens)
    prompts = [models.prompt(runner.model_config, context, seed=row) for row in range(rows)]

    def answers(count: int) -> Contestant:
        params = SamplingParams(max_tokens=count, temperature=temperature, seed=0, ignore_eos=True)
        return Contestant(lambda: [out.token_ids for out in llm.generate(prompts, params)])

    bare, middle = BareStep.of(runner, rows), context + tokens // 2
    chosen = BareStep.of(runner, rows).sampled_at(middle, SlotSettings(temperature=temperature))
    times = alternate(
        {
            "long": answers(tokens),
            "short": answers(1),
            "bare": Contestant(bare.at(middle), burst=BURST),
            "sampled": Contestant(chosen, burst=BURST),
        },
        rounds=rounds,
    )
    step = (times["long"].median - times["short"].median) / (tokens - 1)
    return Generation(rows, step * 1e3, times["bare"].median * 1e3, times["sampled"].median * 1e3)
