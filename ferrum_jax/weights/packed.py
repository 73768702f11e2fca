"""The quantised weights of a Hugging Face folder; their tensors are checked against the folder's configuration.

A weight is quantised if it has the tensors of a quantised weight, so the lists of excluded modules
(`modules_to_not_convert`, `ignore`) are not needed. Scales of activations, keys and values are not read: here these
are computed without scales.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ferrum_jax.contract.errors import InvalidFormatError
from ferrum_jax.weights.assemble import check_problems
from ferrum_jax.weights.safetensors_file import Entry
from ferrum_jax.weights.scheme import AWQ, GPTQ, PLAIN, WORDS, Scheme

Shape = tuple[int, ...]
WORD = 32  # bits
BLOCKS, SCALES, MXFP4_GROUP = "blocks", "scales", 32  # tensors of a stack, and number of inputs that share a scale
_FLOATS = ("F32", "F16", "BF16")
_MARKS = {GPTQ: "qweight", AWQ: "qweight", WORDS: "weight_packed", PLAIN: "weight"}  # the tensor that holds the values
_PACKED_ONLY = ("qzeros", "g_idx", "weight_shape")  # tensors that only packed weights have
_NARROW = ("I8", "F8_E4M3")
_UNREAD = (
    "input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "activation_scale_inv", "output_scale",
    "output_zero_point", "q_scale", "k_scale", "v_scale", "kv_scale", "q_zero_point", "k_zero_point", "v_zero_point",
)  # fmt: skip


@dataclass(frozen=True)
class _Part:
    dtypes: Collection[str]
    shapes: Collection[Shape]  # any of them
    is_needed: bool = True


@dataclass(frozen=True)
class PackedWeight:
    """One quantised matrix, or a stack of them: its shape, and the names of its tensors by role."""

    shape: Shape
    tensors: Mapping[str, str]


def find_weights(
    path: Path, entries: Mapping[str, Entry], scheme: Scheme, read: Callable[[str], NDArray[Any]]
) -> dict[str, PackedWeight]:
    """Returns all quantised weights, by names such as `model.layers.0.mlp.up_proj.weight`.

    Raises:
        InvalidFormatError: tensors are missing, or of a wrong dtype or shape (the message lists all), or no weight is
            quantised.
    """
    found, problems = {}, []
    for name in entries:
        module, _, last = name.rpartition(".")
        if last != _MARKS[scheme.packing]:
            continue
        if scheme.packing == PLAIN and entries[name].dtype not in _NARROW and f"{module}.weight_scale" not in entries:
            continue
        given = _tensors_of(entries, module)
        parts = {part: entries[tensor] for part, tensor in given.items()}
        said = parts.get("weight_shape") if scheme.packing == WORDS else None
        is_said = said is not None and said.shape == (2,)
        shape, wanted = _describe(parts, scheme, read(given["weight_shape"]).tolist() if is_said else None)
        mine = _mismatches(f"{module}.", parts, wanted)
        if scheme.group_size and scheme.block_rows is None and shape[1] % scheme.group_size:
            mine = [f"{module} has {shape[1]} inputs, which groups of {scheme.group_size} do not divide"]
        problems += mine
        found[f"{module}.weight"] = PackedWeight(shape, {part: given[part] for part in wanted if part in given})
    packed = {name.rpartition(".")[0] for name in entries if name.rpartition(".")[2] in _PACKED_ONLY}
    for module in sorted(packed if found else ()):
        if entries.keys().isdisjoint((mark := f"{module}.{_MARKS[scheme.packing]}", f"{module}.weight")):
            problems.append(f"{mark} is missing")
    check_problems(path, problems)
    if not found:
        raise InvalidFormatError(
            f"{path}: quantization_config says {scheme.method}, but no module has a tensor {_MARKS[scheme.packing]!r} "
            "that is quantised so"
        )
    return found


def find_stacks(path: Path, entries: Mapping[str, Entry]) -> dict[str, PackedWeight]:
    """Returns all stacks in MXFP4, by name: `X` has tensors `X_blocks` `[E, F, G, 16]` and `X_scales` `[E, F, G]`.

    Raises:
        InvalidFormatError: tensors are missing, or of a wrong dtype or shape (the message lists all), or there is no
            stack.
    """
    found, problems = {}, []
    for name in sorted({name.rpartition("_")[0] for name in entries if name.endswith((f"_{BLOCKS}", f"_{SCALES}"))}):
        tensors = {part: f"{name}_{part}" for part in (BLOCKS, SCALES)}
        given = {part: entries[tensor] for part, tensor in tensors.items() if tensor in entries}
        shape = given[BLOCKS].shape if BLOCKS in given else (*given[SCALES].shape, MXFP4_GROUP // 2)
        wanted = {BLOCKS: _Part(("U8",), [shape]), SCALES: _Part(("U8",), [shape[:-1]])}
        mine = _mismatches(f"{name}_", given, wanted)
        if BLOCKS in given and (len(shape) != 4 or shape[-1] != MXFP4_GROUP // 2):
            mine += [f"{tensors[BLOCKS]} has shape {list(shape)}, expected experts, outputs, groups and 16"]
        problems += mine
        if not mine:
            found[name] = PackedWeight((*shape[:2], shape[2] * MXFP4_GROUP), tensors)
    check_problems(path, problems)
    if not found:
        raise InvalidFormatError(f"{path}: quantization_config says mxfp4, but no tensor's name ends in '_{BLOCKS}'")
    return found


def is_unread(name: str) -> bool:
    """Whether a tensor is a scale or zero point of activations or of a quantised KV, which are not used here."""
    return name.rpartition(".")[2] in _UNREAD


def _tensors_of(entries: Mapping[str, Entry], module: str) -> dict[str, str]:
    names = ("qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_shape", "weight_scale",
             "weight_zero_point", "weight_g_idx")  # fmt: skip
    found = {part: f"{module}.{part}" for part in names if f"{module}.{part}" in entries}
    if f"{module}.weight_scale_inv" in entries:  # DeepSeek's name; it is multiplied like the others
        found["weight_scale"] = f"{module}.weight_scale_inv"
    return found


def _describe(
    given: Mapping[str, Entry], scheme: Scheme, said: list[int] | None
) -> tuple[tuple[int, int], dict[str, _Part]]:
    """Returns a weight's shape (`said` if it is stored, as words may have unused bits) and the tensors it needs."""
    per_word = WORD // scheme.bits
    stored = given[_MARKS[scheme.packing]].shape
    height, width = stored if len(stored) == 2 else (0, 0)
    if scheme.packing in (GPTQ, AWQ):  # words along inputs, or along outputs
        is_gptq = scheme.packing == GPTQ
        shape = (width, height * per_word) if is_gptq else (width * per_word, height)
        groups = _count(shape[1], scheme)
        parts = {
            "qweight": _Part(("I32",), [(height, width)]),
            "qzeros": _Part(("I32",), [(groups, -(-shape[0] // per_word))]),
            "scales": _Part(_FLOATS, [(groups, shape[0])]),
        }
        order = {"g_idx": _Part(("I32",), [(shape[1],)], is_needed=scheme.is_ordered)}
        return shape, parts | (order if is_gptq else {})
    shape = (height, width)
    if scheme.packing == WORDS:
        shape = (height, width * per_word) if said is None else (said[0], said[1])
    groups, rows = _count(shape[1], scheme), -(-shape[0] // (scheme.block_rows or 1))
    scales: list[Shape] = [(rows, groups)]
    if scheme.group_size is None:
        scales += [(shape[0],), (1,), (), (1, 1)]
    is_shifted = not scheme.is_symmetric
    has_words = "weight_zero_point" in given and given["weight_zero_point"].dtype == "I32"  # along outputs
    if scheme.packing == PLAIN:
        return shape, {
            "weight": _Part(("F8_E4M3",) if scheme.is_float else ("I8",), [shape]),
            "weight_scale": _Part((*_FLOATS, "F8_E8M0"), scales),
            "weight_zero_point": _Part(("I8",), scales, is_shifted),
        }
    return shape, {
        "weight_packed": _Part(("I32",), [(shape[0], -(-shape[1] // per_word))]),
        "weight_scale": _Part(_FLOATS, scales),
        "weight_shape": _Part(("I64", "I32"), [(2,)]),
        "weight_zero_point": _Part(
            ("I8", "I32"), [(-(-shape[0] // per_word), groups)] if has_words else scales, is_shifted
        ),
        "weight_g_idx": _Part(("I32",), [(shape[1],)], is_needed=False),
    }


def _count(columns: int, scheme: Scheme) -> int:
    """Returns the number of groups of a channel; the last block may be narrower."""
    return 1 if scheme.group_size is None else -(-columns // scheme.group_size)


def _mismatches(prefix: str, given: Mapping[str, Entry], wanted: Mapping[str, _Part]) -> list[str]:
    problems = []
    for part, want in wanted.items():
        if part not in given:
            problems += [f"{prefix}{part} is missing"] if want.is_needed else []
        elif given[part].dtype not in want.dtypes:
            problems.append(f"{prefix}{part} is {given[part].dtype}, expected {' or '.join(want.dtypes)}")
        elif given[part].shape not in want.shapes:
            expected = " or ".join(str(list(shape)) for shape in want.shapes)
            problems.append(f"{prefix}{part} has shape {list(given[part].shape)}, expected {expected}")
    return problems
