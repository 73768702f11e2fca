"""What do masks of structured output cost beside the same answers without them?

All rows are answered together by `LLM.generate`, drawn at temperature 1, to the same number of tokens: without a form,
with one row of a form among the others, with every row of a form, and with every row of a form and speculation, which
drafts what prompt lookup proposes or the form forces. The form is a JSON schema whose answers do not end before their
limit. Its masks are computed on the host, and no step is begun before the last one's tokens are known.
"""

import string
from typing import Any

import tokenizers

from bench import card, models
from bench.setting import start
from bench.timing import Contestant, Timing, alternate
from ferrum_jax.config import EngineConfig
from ferrum_jax.generate.llm import LLM
from ferrum_jax.generate.params import SamplingParams
from ferrum_jax.generate.speculation import Speculation
from ferrum_jax.generate.structured import Structured
from ferrum_jax.generate.tokenizer import Tokenizer, load_tokenizer
from ferrum_jax.weights import hub

ROWS, SMOKE_ROWS = 8, 2
PROMPT, TOKENS = 16, 128  # tokens of a prompt and of an answer
SMOKE = 4, 8  # the same
DRAFTED = 4  # tokens at a time
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["fruit", "tool", "book"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "price": {"type": "number"},
    },
    "required": ["name", "kind", "count", "price"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1000}


def main() -> None:
    """Measures them in turn and prints the table and the JSON line."""
    found = card.options(__doc__)
    models.check_has_files(found.model)
    setting = start(found, _engine(ROWS, PROMPT + TOKENS), _engine(SMOKE_ROWS, sum(SMOKE)))
    runner = setting.runner
    size = runner.model_config.vocab_size
    tokenizer = _letters(size) if found.smoke else load_tokenizer(hub.resolve(found.model))
    prompt, tokens = SMOKE if found.smoke else (PROMPT, TOKENS)
    drafting = LLM.from_model(runner, tokenizer, speculation=Speculation(num_tokens=DRAFTED))
    llm, rows = LLM.from_model(runner, tokenizer), runner.plan.max_seqs
    drafting.warmup(progress=False)
    prompts = [models.prompt(runner.model_config, prompt, seed=at) for at in range(rows)]
    plain = SamplingParams(max_tokens=tokens, temperature=1.0, seed=0, ignore_eos=True)
    formed = SamplingParams(max_tokens=tokens, temperature=1.0, seed=0, structured=Structured(json=SCHEMA))

    def answer(formed_rows: int, by: LLM = llm) -> None:
        outs = by.generate(prompts, [formed] * formed_rows + [plain] * (rows - formed_rows))
        if short := [len(out.token_ids) for out in outs if len(out.token_ids) != tokens]:
            raise RuntimeError(f"answers have {short} tokens, expected {tokens}")

    counts = {"none": 0, "one": 1, "all": rows}
    contestants = {name: Contestant(lambda count=count: answer(count)) for name, count in counts.items()}
    counts["all, drafted"] = rows
    contestants["all, drafted"] = Contestant(lambda: answer(rows, drafting))
    times = alternate(contestants, rounds=found.rounds)
    accepted = drafting.acceptance_rate
    llm.close()
    drafting.close()
    results = [_row(name, counts[name], timing, rows * tokens, times["none"]) for name, timing in times.items()]
    cells = []
    for row in results:
        how = f"{row['formed_rows']} of {rows}" + (", drafted" if row["name"] == "all, drafted" else "")
        cells.append([how, f"{row['tokens_per_second']:.0f}", f"{row['ratio']:.3f}"])
    card.show_table(("rows of a form", "tokens/s", "time over none"), cells, left=())
    print(f"{accepted:.0%} of what was drafted was right")
    setting.finish("structured", results, acceptance=accepted)


def _row(name: str, formed: int, timing: Timing, tokens: int, plain: Timing) -> dict[str, Any]:
    return {
        "name": name,
        "formed_rows": formed,
        "seconds": timing.median / 1e3,
        "tokens_per_second": tokens / timing.median * 1e3,
        "ratio": timing.median / plain.median,
    }


def _engine(rows: int, capacity: int) -> EngineConfig:
    return EngineConfig(max_seqs=rows, kv_capacity=capacity, decode_rows=(rows,), spec_tokens=DRAFTED)


def _letters(vocab_size: int) -> Tokenizer:
    """A vocabulary of characters and ids that stand for nothing."""
    own = [*string.ascii_letters, *string.digits, *string.punctuation, "\u0120"]  # and the space
    texts = own + [f"<{at}>" for at in range(len(own), vocab_size)]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={one: at for at, one in enumerate(texts)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend=backend, eos_token_ids=(vocab_size - 1,))


if __name__ == "__main__":
    main()
