"""Attention over a paged KV as one GPU kernel, written in Pallas and compiled by Triton.

Dao 2023, "FlashAttention-2", sections 3.1 and 3.3 (order of the loops, packing of grouped queries); Dao et al. 2023,
"Flash-Decoding for long-context inference" (few rows over long contexts); Kwon et al. 2023, "PagedAttention", section
4.1 (through the block table). Scores, softmax and accumulation are float32.

A program has one row, one kv head, a tile of its G query heads' tokens and a share of the positions. It reads each key
and value once for the heads of its tile, which except for latents are all G. A step of one token then reads
`2 * K * H * itemsize` bytes per visible position and layer; these bytes over the bandwidth are its least time: 0.5 GB
for a row of Llama 3.1 8B at 4096 positions in bfloat16, 0.16 ms at 3.35 TB/s. The kernel's operand is the pool itself,
with the layer as an index: nothing is sliced or copied.

On a CPU the same kernel runs interpreted: exact and slow, for tests.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from ferrum_jax.kvcache import state
from ferrum_jax.kvcache.state import KvState
from ferrum_jax.ops.batch import Rows
from ferrum_jax.ops.linear import precision
from ferrum_jax.ops.triton_launch import PROGRAMS, SMALLEST_PART, launch

SMALLEST_SHARE = 256  # positions of a program: for fewer, the merge costs more than it saves
MERGED = 1 << 12  # numbers of a row's shares that are merged at a time, in registers
LOG2E = math.log2(math.e)


def attend_triton(
    q: Float[Array, "B T N H"],
    kv: KvState[jax.Array],
    layer: int | Int[Array, ""],
    rows: Rows[jax.Array],
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attends as `attend`."""
    keys, values = state.rows_of_heads(kv)
    first = jnp.asarray(layer, jnp.int32) * state.num_blocks(kv)  # the layer's first block in the whole pool
    tiles = choose_tiles(q, state.num_kv_heads(kv), state.block_size(kv), rows.tables.shape[1])
    call = functools.partial(
        _call, tiles=tiles, scale=scale, window=window, softcap=softcap, has_sinks=sinks is not None,
        is_latent=kv.layout == "latent_rows",
    )  # fmt: skip
    sinks = jnp.zeros(q.shape[2], jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    return launch(call, q, keys, values, rows.tables + first, rows.lengths, rows.counts, sinks)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the work is cut into programs; all sizes except `group`, `block` and `shares` are powers of two."""

    rows: int  # rows of a product: (token, query head of the group) pairs, tokens outermost
    keys: int  # positions read at a time
    shares: int  # programs among which one row's positions are divided
    group: int  # G
    block: int  # C
    parts: tuple[tuple[int, int], ...]  # start and size of each part of a head's width
    warps: int
    stages: int  # of the pipeline: tiles of keys and values being loaded


def choose_tiles(q: Float[Array, "B T N H"], kv_heads: int, block_size: int, columns: int) -> Tiles:
    """Chooses the tiles for an H100; other GPUs since Ampere use the same ones.

    Keys and values being loaded take `2 * stages * keys * H * itemsize` bytes of the 227 KB of shared memory (99 KB on
    the smallest GPUs), half of that for latents: 64 KB in bfloat16 at a width of 128. Float32 products use no tensor
    cores and hold their operands in registers, which do not suffice for more than 16 rows.
    """
    batch, tokens, heads, width = q.shape
    group = heads // kv_heads
    exact, wide = q.dtype.itemsize == 4, width > 128
    most = 16 if exact or width > 256 else 64 if wide else 128
    rows = min(max(pl.next_power_of_2(tokens * group), SMALLEST_PART), most)
    keys = 32 if exact or wide else 64
    programs = pl.cdiv(tokens * group, rows) * kv_heads * batch
    useful = pl.cdiv(columns * block_size, SMALLEST_SHARE)
    return Tiles(
        rows=rows,
        keys=keys,
        shares=max(1, min(PROGRAMS // programs, useful)),
        group=group,
        block=block_size,
        parts=_powers(width),
        warps=4,
        stages=2,
    )


def _powers(width: int) -> tuple[tuple[int, int], ...]:
    """Cuts a head's width into powers of two, the only sizes that Triton supports: 80 into 64 and 16."""
    parts, start = [], 0
    while start < width:
        size = 1 << ((width - start).bit_length() - 1)
        parts.append((start, size))
        start += size
    return tuple(parts)


@functools.partial(
    jax.jit, static_argnames=("tiles", "scale", "window", "softcap", "has_sinks", "is_latent", "interpret")
)
def _call(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "R K H"],
    values: Float[Array, "R K H"],
    tables: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    counts: Int[Array, " B"],
    sinks: Float[Array, " N"],
    *,
    tiles: Tiles,
    scale: float,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    is_latent: bool,
    interpret: bool,
) -> Float[Array, "B T N H"]:
    """Launches the kernel. A jit of its own, so that the layers of a step share one lowering."""
    batch, tokens, heads, width = q.shape
    kv_heads = heads // tiles.group
    kernel = functools.partial(
        _kernel, tokens=tokens, tiles=tiles, scale=scale, window=window, softcap=softcap, has_sinks=has_sinks,
        is_latent=is_latent,
    )  # fmt: skip
    out, log_sums = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(tokens * tiles.group, tiles.rows), kv_heads, batch * tiles.shares),
        out_shape=(
            jax.ShapeDtypeStruct((tiles.shares, *q.shape), q.dtype if tiles.shares == 1 else jnp.float32),
            jax.ShapeDtypeStruct((tiles.shares, *q.shape[:-1]), jnp.float32),
        ),
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="attend_paged",
    )(q, keys, values, tables, lengths, counts, sinks)
    if tiles.shares == 1:
        return out[0]
    lines = batch * tokens * heads
    merged = merge(
        out.reshape(-1, lines, width),
        log_sums.reshape(-1, lines),
        parts=tiles.parts,
        dtype=q.dtype,
        interpret=interpret,
    )
    return merged.reshape(q.shape)


def _kernel(
    q_ref: Any,  # [B, T, N, H]
    k_ref: Any,  # [R, K, H]
    v_ref: Any,  # [R, K, H]
    tables_ref: Any,  # [B, M]: blocks of the whole pool
    lengths_ref: Any,  # [B]
    counts_ref: Any,  # [B]
    sinks_ref: Any,  # [N]
    out_ref: Any,  # [shares, B, T, N, H]
    log_sums_ref: Any,  # [shares, B, T, N]: log2 of the sum of exponentials; -inf where no position is visible
    *,
    tokens: int,
    tiles: Tiles,
    scale: float,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    is_latent: bool,  # a value is its key, which is read once
):
    """Attends one tile of one kv head's queries to one share of the positions."""
    tile = pl.num_programs(0) - 1 - pl.program_id(0)  # late tokens see the most positions: they go first
    head, row = pl.program_id(1), _div(pl.program_id(2), tiles.shares)
    share = pl.program_id(2) - row * tiles.shares
    length, count = lengths_ref[row], counts_ref[row]
    end = length + count
    at = tile * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    token = _div(at, tiles.group)
    heads = at + (head - token) * tiles.group
    real = token < count
    query_at = jnp.where(real, length + token, -1)
    begin, stop = _share_of(tile, share, length, count, tiles, window)

    queries = [
        triton.load(q_ref.at[row, token[:, None], heads[:, None], _columns(part)], mask=real[:, None], other=0)
        for part in tiles.parts
    ]
    high = precision(queries[0].dtype)

    def visit(index, carry):
        best, total, *outs = carry
        key_at = index * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
        inside = key_at < end
        column = _div(key_at, tiles.block)
        block = triton.load(tables_ref.at[row, column], mask=inside, other=0)
        line = key_at + (block - column) * tiles.block

        def read(ref: Any, part: tuple[int, int]) -> jax.Array:
            found = triton.load(ref.at[line[:, None], head, _columns(part)], mask=inside[:, None], other=0)
            return found.astype(queries[0].dtype)

        keys = [read(k_ref, part) for part in tiles.parts]
        scores = sum(_product(query, key.T, high) for query, key in zip(queries, keys, strict=True))
        seen = inside[None, :] & (key_at[None, :] <= query_at[:, None])
        if window is not None:
            seen &= key_at[None, :] > query_at[:, None] - window
        # Exponentials have base 2.
        scores *= scale * LOG2E if softcap is None else scale / softcap
        scores = jnp.where(seen, scores if softcap is None else softcap * LOG2E * jnp.tanh(scores), -jnp.inf)
        new_best = jnp.maximum(best, scores.max(axis=1))
        finite = jnp.where(new_best == -jnp.inf, 0.0, new_best)
        weights = jnp.exp2(scores - finite[:, None])
        keep = jnp.exp2(best - finite)
        values = keys if is_latent else [read(v_ref, part) for part in tiles.parts]
        outs = [
            out * keep[:, None] + _product(weights.astype(queries[0].dtype), value, high)
            for out, value in zip(outs, values, strict=True)
        ]
        return new_best, total * keep + weights.sum(axis=1), *outs

    nothing = jnp.full(tiles.rows, -jnp.inf, jnp.float32), jnp.zeros(tiles.rows, jnp.float32)
    empty = [jnp.zeros((tiles.rows, size), jnp.float32) for _, size in tiles.parts]
    best, total, *outs = lax.fori_loop(begin, stop, visit, (*nothing, *empty))
    if has_sinks:  # the first share has one more score, whose value is zero
        is_heard = real & (share == 0)
        sink = triton.load(sinks_ref.at[heads], mask=is_heard, other=-jnp.inf) * LOG2E
        new_best = jnp.maximum(best, sink)
        finite = jnp.where(new_best == -jnp.inf, 0.0, new_best)
        keep = jnp.exp2(best - finite)
        best, total, outs = new_best, total * keep + jnp.exp2(sink - finite), [out * keep[:, None] for out in outs]
    safe = jnp.where(total == 0, 1.0, total)
    log_sums = jnp.where(total == 0, -jnp.inf, best + jnp.log2(safe))
    there = token < tokens
    triton.store(log_sums_ref.at[share, row, token, heads], log_sums, mask=there)
    for out, part in zip(outs, tiles.parts, strict=True):
        into = out_ref.at[share, row, token[:, None], heads[:, None], _columns(part)]
        triton.store(into, (out / safe[:, None]).astype(out_ref.dtype), mask=there[:, None])


def _share_of(
    tile: jax.Array, share: jax.Array, length: jax.Array, count: jax.Array, tiles: Tiles, window: int | None
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns the first tile of positions that a program reads, and one past its last: a share of the visible ones."""
    first, last = _div(tile * tiles.rows, tiles.group), _div((tile + 1) * tiles.rows - 1, tiles.group)
    stop = length + jnp.minimum(last + 1, count)
    stop = jnp.where(first < count, _div(stop + tiles.keys - 1, tiles.keys), 0)
    begin = jnp.int32(0) if window is None else _div(jnp.maximum(length + first - (window - 1), 0), tiles.keys)
    each = _div(jnp.maximum(stop - begin, 0) + tiles.shares - 1, tiles.shares)
    return begin + share * each, jnp.minimum(begin + (share + 1) * each, stop)


def merge(
    outs: Float[Array, "shares R H"],
    log_sums: Float[Array, "shares R"],
    *,
    parts: tuple[tuple[int, int], ...],
    dtype: jnp.dtype,
    interpret: bool,
) -> Float[Array, "R H"]:
    """Merges softmax averages over disjoint sets of positions, given log2 of each one's sum, in one kernel.

    Dao et al. 2023, "Flash-Decoding for long-context inference"; Rabe and Staats 2021, "Self-attention does not need
    O(n²) memory", section 2. A share without visible positions has a log-sum of -inf and any output; if no share has
    visible positions, the merged output is zero.
    """
    return pl.pallas_call(
        functools.partial(_merge_kernel, shares=len(outs), parts=parts),
        grid=(outs.shape[1],),
        out_shape=jax.ShapeDtypeStruct(outs.shape[1:], dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge_shares",
    )(outs, log_sums)


def _merge_kernel(
    outs_ref: Any,  # [shares, R, H]
    log_sums_ref: Any,  # [shares, R]
    out_ref: Any,  # [R, H]
    *,
    shares: int,
    parts: tuple[tuple[int, int], ...],
):
    """Merges one row, some shares at a time."""
    row = pl.program_id(0)

    def log_sums_of(first: int, count: int) -> tuple[jax.Array, jax.Array]:
        share = first + jnp.arange(count, dtype=jnp.int32)
        return share, triton.load(log_sums_ref.at[share, row], mask=share < shares, other=-jnp.inf)

    _, log_sums = log_sums_of(0, pl.next_power_of_2(shares))
    best = log_sums.max(axis=0)
    best = jnp.where(best == -jnp.inf, 0.0, best)
    total = jnp.exp2(log_sums - best).sum(axis=0)
    safe = jnp.where(total == 0, 1.0, total)
    for part in parts:
        columns, merged = _columns(part), jnp.zeros(part[1], jnp.float32)
        count = min(pl.next_power_of_2(shares), max(1, MERGED // part[1]))
        for first in range(0, shares, count):
            share, log_sums = log_sums_of(first, count)
            weights = jnp.exp2(log_sums - best)
            outs = triton.load(outs_ref.at[share[:, None], row, columns], mask=(weights > 0)[:, None], other=0)
            merged += (outs * weights[:, None]).sum(axis=0)
        triton.store(out_ref.at[row, columns[0]], (merged / safe).astype(out_ref.dtype))


def _columns(part: tuple[int, int]) -> Int[Array, "1 size"]:
    return part[0] + jnp.arange(part[1], dtype=jnp.int32)[None, :]


def _product(a: jax.Array, b: jax.Array, high: lax.Precision) -> jax.Array:
    return jnp.dot(a, b, precision=high, preferred_element_type=jnp.float32)


def _div(a: jax.Array, by: int) -> jax.Array:
    """Divides non-negative integers, without the corrections of `//` for negative ones."""
    return lax.div(a, jnp.full_like(a, by))
