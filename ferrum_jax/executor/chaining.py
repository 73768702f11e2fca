"""Programs that read a step's logits on the device: they choose tokens, verify drafts, or score given tokens."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ferrum_jax.compile.buckets import Buckets, ProgramKey
from ferrum_jax.compile.planner import StepPlan
from ferrum_jax.compile.sampler import WAYS, ConfigureKey, DistributionKey, MaskKey, SampleKey, VerifyKey
from ferrum_jax.compile.scores import ProcessedScoreKey
from ferrum_jax.compile.step import StepOutputs
from ferrum_jax.executor.answers import ActiveRows, StepPart
from ferrum_jax.executor.batch import Distributions, Output, SampledToken, TargetScores, VerifiedTokens
from ferrum_jax.executor.device import DeviceState
from ferrum_jax.kvcache.sequences import SequenceTable

WITH_SETTINGS = {SampledToken, VerifiedTokens, Distributions, TargetScores}  # outputs that may have settings


def has_settings(output: Output) -> bool:
    """True if an output has sampler settings."""
    return getattr(output, "settings", None) is not None


def has_masks(outputs: Sequence[Output]) -> bool:
    """True if any `SampledToken` has a mask of allowed tokens."""
    return any(isinstance(one, SampledToken) and one.mask is not None for one in outputs)


def _are_verified_with_masks(outputs: Sequence[Output]) -> bool:
    return any(isinstance(one, VerifiedTokens) and one.masks is not None for one in outputs)


def _pack_masks(plan: StepPlan, asked: Sequence[Output]) -> NDArray[np.int32]:
    """Packs the masks of a step's rows as `sampler.verify` takes them."""
    words = next(one.masks.shape[1] for one in asked if isinstance(one, VerifiedTokens) and one.masks is not None)
    table = np.zeros((plan.key.blocks, plan.key.block_tokens, words), np.int32)
    for at, (one, piece) in enumerate(zip(asked, plan.blocks, strict=True)):
        if isinstance(one, VerifiedTokens) and one.masks is not None:
            table[at, : piece.size] = one.masks[piece.start : piece.start + piece.size]
    return table.ravel()


def _sample_key(plan: StepPlan, outputs: Sequence[Output], buckets: Buckets) -> SampleKey:
    """Returns the program that chooses a step's tokens, in the first of `WAYS` that suffices for all of the batch."""
    first, *others = buckets.samples(plan.key.logit_rows)
    if not others:
        return first
    needed = max(WAYS.index(one.settings.way) for one in outputs if isinstance(one, SampledToken))
    return next(key for key in (first, *others) if WAYS.index(key.way) >= needed)


def chained_keys(
    outputs: Sequence[Output], plans: Sequence[StepPlan], buckets: Buckets, *, masked: bool
) -> list[ProgramKey]:
    """Returns the programs that read the logits of steps, and those that write the sampler's settings and masks."""
    kinds = set(map(type, outputs))
    with_settings = bool(kinds & WITH_SETTINGS) and any(map(has_settings, outputs))
    keys: list[ProgramKey] = [ConfigureKey(buckets.kv_capacity)] if with_settings else []
    keys += [MaskKey(buckets.decode_rows[-1])] if masked else []
    for plan in plans:
        key = plan.key
        if key.outputs == "last":
            if SampledToken in kinds:
                keys.append(_sample_key(plan, outputs, buckets))
            continue
        if key.outputs == "scores":
            continue
        asked = [outputs[piece.row] for piece in plan.blocks]
        wanted = set(map(type, asked))
        if VerifiedTokens in wanted:
            keys.append(VerifyKey(key.blocks, key.block_tokens, _are_verified_with_masks(asked)))
        if any(isinstance(one, TargetScores) and has_settings(one) for one in asked):
            keys.append(ProcessedScoreKey(key.blocks, key.block_tokens))
        if Distributions in wanted:
            keys.append(DistributionKey(key.blocks, key.block_tokens))
    return keys


def chain(
    device: DeviceState,
    table: SequenceTable,
    plan: StepPlan,
    outputs: StepOutputs,
    rows: ActiveRows,
    wanted: Sequence[int],
    buckets: Buckets,
) -> StepPart:
    """Begins the programs that read a step's logits; `wanted` is that of `StepPart`."""
    key, asked = plan.key, [rows.outputs[row] for row in wanted]
    kinds = set(map(type, asked))
    sampled = probabilities = processed = None
    if SampledToken in kinds:
        sampled = device.sample(_sample_key(plan, rows.outputs, buckets), outputs)
        for row, one in zip(wanted, asked, strict=True):
            if isinstance(one, SampledToken):
                table.expect(rows.lives[row], rows.ends[row])
    if VerifiedTokens in kinds:
        verify_key = VerifyKey(key.blocks, key.block_tokens, _are_verified_with_masks(asked))
        masks = _pack_masks(plan, asked) if verify_key.is_masked else None
        sampled = device.sample(verify_key, outputs, masks)
    if Distributions in kinds:
        probabilities = device.distributions(DistributionKey(key.blocks, key.block_tokens), outputs)
    if TargetScores in kinds and any(isinstance(one, TargetScores) and has_settings(one) for one in asked):
        packed = np.zeros((key.blocks, 3 + 2 * key.block_tokens), np.int32)
        packed[:, 0] = len(table.table)  # one past the last slot: nobody's
        for at, (row, one, piece) in enumerate(zip(wanted, asked, plan.blocks, strict=True)):
            if isinstance(one, TargetScores) and has_settings(one):
                run = slice(piece.start, piece.start + piece.size)
                packed[at, :3] = rows.slots[row], rows.starts[row] + piece.start, piece.size
                packed[at, 3 : 3 + piece.size] = rows.tokens[row][run]
                packed[at, 3 + key.block_tokens :][: piece.size] = one.targets[run]
        processed = device.score_processed(ProcessedScoreKey(key.blocks, key.block_tokens), outputs, packed.ravel())
    return StepPart(plan, outputs, rows, wanted, asked, sampled, probabilities, processed)
