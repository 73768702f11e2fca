"""What one device does in a step: operations, bytes it reads, and collectives, counted from the configuration.

Attention counts the positions that are seen, over latents in the form of fewer operations; no softmax, norm, rotation
or activation is counted, so that times from these figures are below what any implementation can reach. Of experts, each
token meets those it chooses, and a step reads as many as tokens would choose that choose evenly and by themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferrum_jax.config import ModelConfig
from ferrum_jax.models.division import Division, dim_splits
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamSpec, ParamTree, named_leaves

EMBEDDING = "model.embed_tokens."
Rows = Sequence[tuple[int, int]]  # of each sequence in a step: positions it holds, and new tokens


@dataclass(frozen=True)
class Work:
    """What a step must do."""

    operations: int  # two for each multiplication and addition
    weight_bytes: int  # read once
    kv_bytes: int  # read once

    @property
    def num_bytes(self) -> int:
        """All bytes that are read."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True)
class Collectives:
    """Collectives of one kind and size in a step."""

    kind: str  # all-reduce or all-gather
    what: str
    count: int
    num_bytes: int  # of the result of each, on every device

    def sent_bytes(self, devices: int) -> float:
        """Bytes that each of so many devices sends in one of them, if it is a ring.

        Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
        """
        return (2 if self.kind == "all-reduce" else 1) * (devices - 1) / devices * self.num_bytes

    def hops(self, devices: int) -> int:
        """Steps from device to device in one of them, if it is a ring in both directions."""
        return (2 if self.kind == "all-reduce" else 1) * (devices // 2)


def step_work(
    cfg: ModelConfig,
    rows: Rows,
    *,
    itemsize: int,
    kv_itemsize: int | None = None,
    specs: ParamTree | None = None,
) -> Work:
    """Counts the work of a step, in which the last token of every row wants logits.

    Args:
        cfg: the model, or what a device has of it (`Division.local`).
        rows: of the step.
        itemsize: bytes of a number of the parameters that have no dtype of their own.
        kv_itemsize: bytes of a number in the KV; `itemsize` if None.
        specs: parameters of the device; those of the whole model in its own dtype if None.
    """
    named = named_leaves(family(cfg).param_specs(cfg) if specs is None else specs)
    head = EMBEDDING if cfg.tie_word_embeddings else "lm_head."
    tokens = sum(count for _, count in rows)
    share = 0.0 if cfg.experts is None else cfg.experts.num_experts_per_tok / cfg.experts.num_experts
    met = 1 - (1 - share) ** tokens
    operations, num_bytes = 0, 0.0
    for name, spec in named.items():
        if "expert" in spec.axes:
            operations += 2 * round(numbers_of(name, spec) * share * tokens)
            num_bytes += spec_bytes(spec, itemsize) * met
        elif name.startswith("model.layers.") and len(spec.shape) == 2:
            operations += 2 * numbers_of(name, spec) * tokens
            num_bytes += spec_bytes(spec, itemsize)
        elif name.startswith(head):
            operations += 2 * numbers_of(name, spec) * len(rows)
            num_bytes += spec_bytes(spec, itemsize)
    cached = 2 * cfg.num_key_value_heads * cfg.head_dim if cfg.latent is None else cfg.latent.cached_dim
    held = 0
    for window in cfg.layer_windows:
        for start, count in rows:
            seen, before = _positions(window, start, count)
            operations += 2 * cfg.num_attention_heads * _products_of_a_head(cfg, seen, before)
            held += before + count
    return Work(operations, round(num_bytes), (kv_itemsize or itemsize) * cached * held)


def numbers_of(name: str, spec: ParamSpec) -> int:
    """Numbers that are multiplied: two in each byte of a packed weight, none in its other parts."""
    if not {"scales", "offsets", "high"}.isdisjoint(name.split(".")):
        return 0
    return math.prod(spec.shape) * (2 if spec.dtype == "uint8" else 1)


def spec_bytes(spec: ParamSpec, itemsize: int) -> int:
    """Bytes of a parameter; `itemsize` is of a number whose spec has no dtype."""
    return math.prod(spec.shape) * (itemsize if spec.dtype is None else np.dtype(spec.dtype).itemsize)


def _positions(window: int | None, start: int, count: int) -> tuple[int, int]:
    """Positions of one layer: seen, summed over a row's new tokens, and those before the new ones that any sees."""
    spans = [min(at + 1, window or at + 1) for at in range(start, start + count)]
    return sum(spans), spans[0] - 1


def _products_of_a_head(cfg: ModelConfig, seen: int, before: int) -> int:
    """Numbers that one head multiplies in attention, beyond the projections of new tokens.

    Latent attention has two forms. Either queries and outputs are projected to the latent, which is key and value, or
    keys and values are projected from it. Of new tokens both cost the same; the second projects every earlier position
    again.
    """
    latent = cfg.latent
    if latent is None:
        return 2 * cfg.head_dim * seen
    rank, own = latent.kv_lora_rank, latent.qk_nope_head_dim + latent.v_head_dim
    return min((rank + latent.cached_dim) * seen, (own + latent.qk_rope_head_dim) * seen + own * rank * before)


def step_collectives(
    division: Division | None, *, num_tokens: int, logit_rows: int, itemsize: int
) -> list[Collectives]:
    """Lists the collectives of a step over `num_tokens` tokens, padding included; none on one device.

    `itemsize` is that of activations.
    """
    if division is None:
        return []
    cfg = division.cfg
    specs: Any = family(cfg).param_specs(cfg)
    hidden = num_tokens * cfg.hidden_size * itemsize
    found = [
        Collectives("all-reduce", "embeddings", 1, hidden),
        Collectives("all-reduce", "attention and feed-forward outputs", 2 * cfg.num_hidden_layers, hidden),
    ]
    if "q_norm" in specs["model"]["layers"][0]["self_attn"] and not cfg.qk_norm:  # norms over all heads of a token
        found.append(
            Collectives("all-reduce", "squares of queries and keys", cfg.num_hidden_layers, num_tokens * 2 * 4)
        )
    (columns, _) = dim_splits(specs["model"]["embed_tokens"]["weight"], division)
    assert columns is not None
    width = sum(count for _, count in columns.whole)
    found.append(Collectives("all-gather", "logits", 1, logit_rows * width * 4))
    return found
