"""What do the kernels make of a decode step, by family: experts, latent attention, windows?

Compiled decode steps of models with few layers and random weights, over XLA's code and over the attention backend that
the machine chooses by default, call by call in turn, beside the floor. `qwen3-30b-a3b` has 128 experts of which a token
chooses 8, also kept in four bits as in a Q4_1 file, `gpt-oss-20b` 32 experts of which a token chooses 4, kept in MXFP4,
`deepseek-v2-lite` latent attention, a dense layer and one of 64 experts, `gemma-3-1b` five layers of six with a window
of 512. The KV holds random numbers; `error` is the largest difference of logits of both sides before they
are timed, of the largest logit, and ends the run where it is too large.
"""

from dataclasses import asdict
from typing import Any

import numpy as np

from bench import card, models
from bench.agreement import OURS, check_logits
from bench.bare import BareStep, random_kv
from bench.floor import decode_work
from bench.machine import Probes, ceilings, make_probes, measure
from bench.models import Subject
from bench.timing import Contestant, alternate
from ferrum_jax.compile.step import StepKey
from ferrum_jax.config import ModelConfig
from ferrum_jax.models.backends import cache_spec, choose_attention
from ferrum_jax.models.quantisation import Format, specs_like
from ferrum_jax.ops import native
from ferrum_jax.ops.quantised import FLOAT4, POWERS, UINT4
from ferrum_jax.planning.subject import CONFIGURATIONS
from ferrum_jax.sharding.devices import default_dtype, find_device

FEW = {"vocab_size": 32768, "num_hidden_layers": 2}
CHANGES = {
    "qwen3-30b-a3b": FEW,
    "deepseek-v2-lite": FEW,
    "gpt-oss-20b": FEW,
    "gemma-3-1b": {"vocab_size": 32768, "num_hidden_layers": 6},
}
KEPT = {  # of experts, with a scale for 32 inputs
    "Q4_1": Format(UINT4, scales="float16", offsets="float16"),
    "MXFP4": Format(FLOAT4, scales=POWERS),
}
MODELS = (
    ("qwen3-30b-a3b", None), ("qwen3-30b-a3b", "Q4_1"), ("gpt-oss-20b", "MXFP4"), ("deepseek-v2-lite", None),
    ("gemma-3-1b", None),
)  # fmt: skip
TINY = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 193, "num_attention_heads": 4}
SMOKE = {
    "qwen3-30b-a3b": {"moe_intermediate_size": 32, "num_experts": 16, "head_dim": 16, "num_key_value_heads": 2},
    "gpt-oss-20b": {"intermediate_size": 32, "num_local_experts": 8, "head_dim": 16, "num_key_value_heads": 2},
    "deepseek-v2-lite": {"moe_intermediate_size": 24, "n_routed_experts": 16, "kv_lora_rank": 16,
                         "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4},
    "gemma-3-1b": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},
}  # fmt: skip
PLACES, SMOKE_PLACES = ((1, 256), (8, 256), (1, 1024), (8, 1024)), ((3, 40),)  # rows, positions before the token
BLOCK = 128  # positions
BURST = 4  # calls in a row


def main() -> None:
    """Runs every family and place and prints the table and the JSON line."""
    found = card.options(__doc__)
    if found.model is not None:
        raise SystemExit(f"the models are {', '.join(CHANGES)}; --model {found.model} contradicts that")
    device = find_device(None)
    if device.platform == "cpu" and isinstance(why := native.library(), str):
        raise SystemExit(f"there are no kernels to measure: {why}")
    dtype = default_dtype(device)
    probes = make_probes(dtype, smoke=found.smoke)
    rows, cards = [], []
    for name, kept in MODELS:
        cfg = ModelConfig.from_hf(CONFIGURATIONS[name] | CHANGES[name] | (TINY | SMOKE[name] if found.smoke else {}))
        title = f"{cfg.num_hidden_layers} layers of {name}, random weights"
        if kept is None:
            subject = models.random(title, cfg, dtype)
        else:
            name = f"{name}, experts in {kept}"
            subject = models.with_experts_in(f"{title}, experts in {kept}", cfg, dtype, KEPT[kept])
        sizes = {"dtype": dtype, "kv_dtype": dtype, "block_size": BLOCK}
        chosen = choose_attention(None, cfg, platform=device.platform, **sizes)
        cards.append(card.show_card(subject, machine=measure(probes)))
        for batch, context in SMOKE_PLACES if found.smoke else PLACES:
            rows.append({"model": name} | _measure(subject, batch, context, chosen, probes, found.rounds))
    _show(rows)
    card.finish("kernels", found, card.together(cards), rows)


def _measure(
    subject: Subject, batch: int, context: int, chosen: str, probes: Probes, rounds: int
) -> dict[str, float | str]:
    cfg, columns = subject.config, context // BLOCK + 1
    ids = np.random.default_rng(batch).permutation(cfg.vocab_size)[:batch, None]
    calls = {}
    for attention in dict.fromkeys(("xla", chosen)):
        sizes = {"num_blocks": batch * columns, "block_size": BLOCK, "dtype": subject.dtype}
        spec = cache_spec(cfg, **sizes, attention=attention)
        key, kv = StepKey(batch, 0, 0, columns, batch), random_kv(spec, seed=batch)
        calls[attention] = BareStep(cfg, subject.params, spec, key, kv=kv).at(context, ids)
    logits = {attention: Contestant(lambda call=call: call().logits) for attention, call in calls.items()}
    limits = dict.fromkeys(logits, OURS[subject.dtype])
    errors = check_logits(f"{subject.name}, {batch} rows at {context}", logits, "xla", limits)
    sides = {attention: Contestant(call, burst=BURST) for attention, call in calls.items()}
    times = alternate(sides | probes.contestants, rounds=rounds)
    machine = ceilings(probes, times)
    itemsize, own = np.dtype(subject.dtype).itemsize, specs_like(subject.params, cfg)
    floor = decode_work(cfg, rows=batch, context=context, itemsize=itemsize, specs=own).floor_ms(machine)
    return {
        "rows": batch,
        "context": context,
        "attention": chosen,
        "relative_error": max(errors.values(), default=0.0),
        "xla_ms": times["xla"].median,
        "step_ms": times[chosen].median,
        "step_p90_ms": times[chosen].p90,
        "floor_ms": floor,
        "xla_over_floor": times["xla"].median / floor,
        "step_over_floor": times[chosen].median / floor,
        **{rate: round(value) for rate, value in asdict(machine).items()},
    }


def _show(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        cells = [row["model"], f"{row['rows']}", f"{row['context']}", f"{row['xla_ms']:.1f}", f"{row['step_ms']:.1f}"]
        cells += [f"{row['step_p90_ms']:.1f}", f"{row['floor_ms']:.1f}"]
        cells += [f"{row['xla_over_floor']:.2f}", f"{row['step_over_floor']:.2f}"]
        lines.append([*cells, f"{row['relative_error']:.0e}"])
    headings = ("model", "rows", "context", "XLA ms", "kernels ms", "p90", "floor ms", "XLA / floor", "kernels / floor")
    headings = (*headings, "error")
    card.show_table(headings, lines, left=("model",))


if __name__ == "__main__":
    main()
