"""How long do a rollout and a transfer of weights take in tunix with this engine, and with tunix's own sampler?

`FerrumRollout` and tunix's vanilla rollout generate for the same Llama 3 model of tunix: the samples of one step of
GRPO, drawn at temperature 1 with their log-probabilities, each prompt as often as it has samples. No token ends an
answer early, so that both compute as many. A transfer hands the trainer's weights over; the vanilla rollout shares its
buffers with the trainer and copies nothing. It needs the extra `tunix`.
"""

# pyright: reportMissingImports=false
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import card, models
from bench.timing import Contestant, Timing, alternate
from ferrum_jax.weights.foreign import to_tree
from ferrum_jax.weights.name_tables import tunix_rules

ANSWERS, SAMPLES, TOKENS, LIMIT = 8, 4, 64, 128  # answers, those of one prompt, tokens of a prompt and of an answer
SMOKE = 4, 2, 5, 6  # the same
PAD, BEGIN = 0, 1  # token ids


def main() -> None:
    """Measures both and prints the table and the JSON line."""
    found = card.options(__doc__, rounds=5)
    subject = models.read(found, "float32")
    if subject.config.model_type != "llama":
        raise SystemExit(f"{subject.name} is a {subject.config.model_type}: this benchmark takes a Llama")
    conditions = card.show_card(subject)
    answers, samples, tokens, limit = SMOKE if found.smoke else (ANSWERS, SAMPLES, TOKENS, LIMIT)
    size = subject.config.vocab_size
    drawn = [np.random.RandomState(at).randint(BEGIN + 1, size, tokens - 1) for at in range(answers // samples)]
    prompts = [" ".join(map(str, own)) for own in drawn for _ in range(samples)]
    times = _measure(subject, prompts, tokens, limit, found.rounds)
    rows = [
        {
            "what": f"rollout of {answers} answers of {limit} tokens",
            "tokens_per_second": answers * limit / times["rollout"].median * 1e3,
            "theirs_tokens_per_second": answers * limit / times["their rollout"].median * 1e3,
            **_both(times, "rollout"),
        },
        {"what": "transfer of weights", **_both(times, "transfer")},
    ]
    cells = [[row["what"], f"{row['ours_s']:.3f}", f"{row['theirs_s']:.3f}", f"{row['ratio']:.2f}"] for row in rows]
    card.show_table(("", "ours s", "tunix s", "ratio"), cells, left=("",))
    card.finish("grpo", found, conditions, rows)


def _measure(subject: models.Subject, prompts: list[str], tokens: int, limit: int, rounds: int) -> dict[str, Timing]:
    from flax import nnx
    from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    from ferrum_jax.integrations.tunix import FerrumRollout

    cfg = subject.config
    model = _tunix_model(subject)
    config = RolloutConfig(
        max_tokens_to_generate=limit,
        max_prompt_length=tokens,
        kv_cache_size=tokens + limit,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=[cfg.vocab_size],  # which no token is
        return_logprobs=True,
    )
    rows = len(prompts)
    sizes = {"max_seqs": rows, "decode_rows": (rows,)}
    ours = FerrumRollout(model, IdTokenizer(), rollout_config=config, **sizes)
    cache = CacheConfig(tokens + limit, cfg.num_hidden_layers, cfg.num_key_value_heads, cfg.head_dim)
    theirs = VanillaRollout(model, IdTokenizer(), cache)
    weights = nnx.state(model, nnx.Param)

    def rollout(engine: Any) -> None:
        out = engine.generate(prompts, config)
        lengths = [len(own) for own in out.tokens]
        if lengths != [limit] * rows:
            raise RuntimeError(f"answers have {lengths} tokens, expected {limit} each")

    def transfer(engine: Any) -> Any:
        engine.update_params(weights)
        return ours.llm.runner.params if engine is ours else jax.tree.leaves(nnx.state(theirs.model(), nnx.Param))

    contestants = {
        "rollout": Contestant(lambda: rollout(ours)),
        "their rollout": Contestant(lambda: rollout(theirs)),
        "transfer": Contestant(lambda: transfer(ours)),
        "their transfer": Contestant(lambda: transfer(theirs)),
    }
    try:
        for one in contestants.values():  # tunix's sampler compiles again once it has other weights
            one.run()
        return alternate(contestants, rounds=rounds)
    finally:
        ours.close()


def _tunix_model(subject: models.Subject) -> Any:
    """Returns tunix's Llama 3 with the subject's weights."""
    from flax import nnx
    from tunix.models.llama3 import model as llama3

    cfg = subject.config
    config = llama3.ModelConfig(
        num_layers=cfg.num_hidden_layers,
        vocab_size=cfg.vocab_size,
        embed_dim=cfg.hidden_size,
        hidden_dim=cfg.intermediate_size,
        num_heads=cfg.num_attention_heads,
        head_dim=cfg.head_dim,
        num_kv_heads=cfg.num_key_value_heads,
        rope_theta=int(cfg.rope_theta),
        norm_eps=cfg.rms_norm_eps,
        weight_tying=cfg.tie_word_embeddings,
    )
    with jax.numpy_dtype_promotion("standard"):
        model = llama3.Llama3(config, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    nnx.update(model, to_tree(jax.tree.map(jnp.asarray, subject.params), cfg, tunix_rules(cfg), like=state))
    return model


class IdTokenizer:
    """A tokenizer whose texts are token ids with spaces between them."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Reads the ids."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        """Writes the ids."""
        return " ".join(map(str, ids))

    def pad_id(self) -> int:
        """The token that pads."""
        return PAD

    def bos_id(self) -> int:
        """The token that begins a prompt."""
        return BEGIN

    def eos_id(self) -> int:
        """The token that ends an answer where a rollout names no others."""
        return PAD

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        """Returns what it is given: no prompt here begins twice."""
        return ids


def _both(times: dict[str, Timing], name: str) -> dict[str, float]:
    ours, theirs = times[name].median / 1e3, times[f"their {name}"].median / 1e3
    return {"ours_s": ours, "theirs_s": theirs, "ratio": theirs / ours}


if __name__ == "__main__":
    main()
