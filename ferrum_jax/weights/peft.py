"""Adapters in PEFT's format: a folder with `adapter_config.json` and `adapter_model.safetensors`.

Checked against PEFT itself: tests/models/test_adapters.py, tests/reference/test_adapters_reference.py.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.errors import (
    ConfigError,
    InvalidFormatError,
    InvalidParameterError,
    NotFoundError,
    RequestValidationError,
    UnsupportedError,
)
from ferrum_jax.models import adapters, specs
from ferrum_jax.models.adapters import LoraSpec
from ferrum_jax.models.specs import ParamSpec, ParamTree
from ferrum_jax.weights.assemble import check_problems, check_tensors
from ferrum_jax.weights.folder import read_json
from ferrum_jax.weights.peft_config import PeftConfig
from ferrum_jax.weights.safetensors_file import read_entries, read_tensor, text_name

_BASE = "base_model.model."  # before a module's own name
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

Halves = tuple[NDArray[np.float32], NDArray[np.float32]]  # down [r, D], up [F, r]


@dataclass(frozen=True, kw_only=True, eq=False)
class PeftAdapter:
    """One adapter for one model, as its folder has it."""

    path: Path
    cfg: ModelConfig
    rank: int  # the largest rank of its projections
    projections: Mapping[str, Halves]  # by names such as `model.layers.3.self_attn.q_proj`; `up` includes the scale


def has_files(folder: str | Path) -> bool:
    """True if both files of an adapter exist."""
    folder = os.path.expanduser(folder)
    return all(os.path.isfile(os.path.join(folder, name)) for name in (CONFIG, WEIGHTS))


def read_adapter(folder: str | Path, cfg: ModelConfig) -> PeftAdapter:
    """Reads an adapter for a model; every tensor must belong to a target, and every target must have its tensors.

    Raises:
        NotFoundError: the folder or one of its two files does not exist.
        UnsupportedError: the adapter changes the model in a way that is not implemented.
        ConfigError: a setting is missing, has the wrong type or matches no projection of the model.
        InvalidFormatError: a file is damaged, or tensors are missing, unknown, of a wrong shape or not finite; the
            message lists all.
    """
    folder = Path(os.path.expanduser(folder))
    config = _read_config(folder)
    path = folder / WEIGHTS
    if not path.exists() and (folder / PICKLE).exists():
        raise UnsupportedError(f"{folder / PICKLE} is a pickle, which may run code: save the adapter as {WEIGHTS}")
    entries = read_entries(path)
    spelt = _spelling(entries)
    products = {name: weight for name, weight in adapters.projections(cfg).items() if config.is_target(spelt(name))}
    ranks = {name: config.rank_of(spelt(name)) for name in products}
    for other in ("lm_head", "model.embed_tokens"):
        if config.is_target(spelt(other)):
            raise UnsupportedError(
                f"{folder / CONFIG}: adapters of {other} are not implemented, only of {', '.join(adapters.PROJECTIONS)}"
            )
    if not products:
        raise ConfigError(f"{folder / CONFIG}: target_modules name no projection of this model")
    tensor_of = _canonical(path, {name: entry.shape for name, entry in entries.items()})
    check_tensors(path, {name: shape for name, (_, shape) in tensor_of.items()}, _tensors(products, ranks))
    projections: dict[str, Halves] = {}
    problems = []
    for product in products:
        halves = []
        for half, scale in (("A", 1.0), ("B", config.scale_of(spelt(product)))):
            name, _ = tensor_of[_name(product, half)]
            with np.errstate(over="ignore", invalid="ignore"):
                halves.append(read_tensor(entries[name]).astype(np.float32) * np.float32(scale))
            if not np.isfinite(halves[-1]).all():
                problems.append(f"{name} has values that are not finite in float32, its scale included")
        projections[product] = (halves[0], halves[1])
    check_problems(path, problems)
    return PeftAdapter(path=folder, cfg=cfg, rank=max(ranks.values()), projections=projections)


def lay_out(adapter: PeftAdapter, spec: LoraSpec, dtype: str) -> ParamTree:
    """Returns the tree of `models.adapters.adapter_specs` in NumPy; zeros pad ranks and fill other projections.

    Raises:
        RequestValidationError: the rank of the adapter is above `spec.max_rank`.
        InvalidFormatError: values are not finite in `dtype`.
    """
    if adapter.rank > spec.max_rank:
        raise RequestValidationError(
            f"{adapter.path} has rank {adapter.rank}, more than max_lora_rank, which is {spec.max_rank}"
        )
    wanted = specs.named_leaves(adapters.adapter_specs(adapter.cfg, spec))
    leaves = {name: np.zeros(leaf.shape, jnp.dtype(dtype)) for name, leaf in wanted.items()}
    problems = []
    for name, (down, up) in adapter.projections.items():
        with np.errstate(over="ignore"):
            leaves[f"{name}.down"][: len(down)] = down.astype(jnp.dtype(dtype))
            leaves[f"{name}.up"][:, : up.shape[1]] = up.astype(jnp.dtype(dtype))
        problems += [
            f"{name}.{half} has values that are not finite in {dtype}"
            for half in ("down", "up")
            if not np.isfinite(leaves[f"{name}.{half}"]).all()
        ]
    check_problems(adapter.path, problems)
    return specs.from_names(adapters.adapter_specs(adapter.cfg, spec), leaves)


def write_adapter(folder: str | Path, stacks: ParamTree, cfg: ModelConfig, index: int = 0) -> None:
    """Writes one row of stacks (models/adapters.py) in PEFT's format, with a scale of 1.

    Projections that the stacks leave out, or whose rank is 0, are not written.

    Raises:
        InvalidParameterError: the arrays are not those of adapters of this model, do not have this row, or change no
            projection.
    """
    leaves, tensors, ranks = specs.named_leaves(adapters.checked_stacks(stacks, cfg)), {}, {}
    for name in adapters.projections(cfg):
        down, up = (np.asarray(leaves[f"{name}.{half}"], np.float32) for half in ("down", "up"))
        if not 0 <= index < len(down):
            raise InvalidParameterError(f"there are {len(down)} adapters, number {index} is not among them")
        if one := down.shape[1]:
            ranks[name] = one
            tensors[_name(name, "A")] = np.ascontiguousarray(down[index])
            tensors[_name(name, "B")] = np.ascontiguousarray(up[:, index])
    if not ranks:
        raise InvalidParameterError("the adapter changes no projection: every rank is 0")
    folder, rank = Path(os.path.expanduser(folder)), max(ranks.values())
    own = {re.escape(name): one for name, one in ranks.items() if one != rank}
    targets = sorted(
        ranks if len(ranks) < len(adapters.projections(cfg)) else {name.rpartition(".")[2] for name in ranks}
    )
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    config |= {"rank_pattern": own, "alpha_pattern": own}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")


def _read_config(folder: Path) -> PeftConfig:
    try:
        found = folder.is_dir()
    except OSError as problem:  # the name is too long
        raise NotFoundError(f"{folder} cannot be found: {problem.strerror}") from None
    if not found:
        raise NotFoundError(f"{folder} is no directory, expected one with {CONFIG} and {WEIGHTS}")
    path = folder / CONFIG
    try:
        return PeftConfig.from_json(read_json(path))
    except (ConfigError, UnsupportedError) as problem:
        raise type(problem)(f"{path}: {problem}") from None


def _canonical(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Maps every tensor's current name to its name in the file and its shape.

    In older files it has `.default`, and in an adapter of a multimodal model `language_model.` (`text_name`).
    """
    named = {}
    for name, shape in shapes.items():
        today = name.replace(".lora_A.default.", ".lora_A.").replace(".lora_B.default.", ".lora_B.")
        if today.startswith(_BASE) and "language_model." in today:
            today = _BASE + (text_name(today.removeprefix(_BASE)) or today.removeprefix(_BASE))
        if today in named:
            raise InvalidFormatError(f"{path}: {name} is there twice, also as {named[today][0]}")
        named[today] = (name, shape)
    return named


def _spelling(names: Iterable[str]) -> Callable[[str], str]:
    """Returns how an adapter with these tensors spells a module, which its configuration names or matches."""
    own = [name.removeprefix(_BASE) for name in names]
    if any(name.startswith("language_model.") for name in own):
        return lambda module: f"language_model.{module}"
    if any(name.startswith("model.language_model.") for name in own):
        return lambda module: module.replace("model.", "model.language_model.", 1)
    return lambda module: module


def _tensors(products: Mapping[str, ParamSpec], ranks: Mapping[str, int]) -> dict[str, ParamSpec]:
    wanted = {}
    for name, weight in products.items():
        (out_size, in_size), (out_axis, in_axis), rank = weight.shape, weight.axes, ranks[name]
        wanted[_name(name, "A")] = ParamSpec((rank, in_size), ("rank", in_axis))
        wanted[_name(name, "B")] = ParamSpec((out_size, rank), (out_axis, "rank"))
    return wanted


def _name(product: str, half: str) -> str:
    return f"{_BASE}{product}.lora_{half}.weight"
