"""The model a plan is for: a published configuration by its name, or a `config.json`, and how its weights are kept."""

import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from ferrum_jax.config import DTYPES, ModelConfig
from ferrum_jax.contract.errors import ConfigError, UnsupportedError, safe_repr
from ferrum_jax.models.quantisation import Format, Formats, choose_formats, quantised_specs
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamTree, named_leaves
from ferrum_jax.ops.quantised import FLOAT4, LARGEST, POWERS
from ferrum_jax.weights.folder import read_json
from ferrum_jax.weights.hub import model_name
from ferrum_jax.weights.packed import MXFP4_GROUP
from ferrum_jax.weights.scheme import MXFP4, split_packing

CONFIGURATIONS: dict[str, dict[str, Any]] = json.loads(  # of models too large to ship, by name
    files("ferrum_jax.planning").joinpath("published.json").read_text("utf-8")
)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model without its weights."""

    name: str
    cfg: ModelConfig
    dtype: str = "bfloat16"  # of activations, and of weights that have no format
    formats: Formats = field(default_factory=dict)  # of quantised weights, by name

    @property
    def specs(self) -> ParamTree:
        """Specs of the parameters, undivided."""
        specs = family(self.cfg).param_specs(self.cfg)
        return quantised_specs(specs, self.formats) if self.formats else specs

    @property
    def weights(self) -> str:
        """What most weights are kept in."""
        return next(iter(self.formats.values())).dtype if self.formats else self.dtype


def read_subject(model: str, dtype: str | None = None) -> Subject:
    """Reads a model's configuration.

    Args:
        model: one of `CONFIGURATIONS`, in any case, the path of a `config.json`, or of a folder that has one.
        dtype: `bfloat16` or `float16`: of weights and activations; `int8` or `float8_e4m3fn`: every matrix in so many
            bits with a scale for each of its rows, activations in bfloat16, as `load` has them with this `quantize`;
            `mxfp4`: experts in four bits, as GPT-OSS is published and `quantize="keep"` has it, the rest in bfloat16.
            None: bfloat16, into which `load` dequantises folders and GGUF files on an accelerator by default. (Data
            sheets say nothing of products in full float32.)

    Raises:
        ConfigError: there is no such model or dtype.
        UnsupportedError: the configuration has a setting that is not implemented.
        FerrumError: a file cannot be read.
    """
    plain = tuple(name for name in DTYPES if name != "float32")
    known = (*plain, *LARGEST, MXFP4)
    if dtype is not None and dtype not in known:
        raise ConfigError(f"dtype is {safe_repr(dtype)}, expected {', '.join(known[:-1])} or {known[-1]}")
    name, fields = model.lower(), CONFIGURATIONS.get(model.lower())
    if fields is None:
        try:
            path = Path(model).expanduser().resolve()
            is_folder = path.is_dir()
            path = path / "config.json" if is_folder else path
            is_file = path.is_file()
        except (OSError, RuntimeError) as problem:  # no such user, no home, or it may not be read
            raise ConfigError(f"{model} cannot be found: {problem}") from None
        if path.suffix == ".gguf" or (is_folder and not is_file):
            raise UnsupportedError(f"{model} has no config.json: a plan reads that which the model was published with")
        if not is_file:
            raise ConfigError(f"{model} is no file or folder, and known names are {', '.join(CONFIGURATIONS)}")
        name, fields = model_name(path.parent) if path.name == "config.json" else path.stem, read_json(path)
    cfg = ModelConfig.from_hf(split_packing(fields)[0])
    if dtype in LARGEST:
        return Subject(name=name, cfg=cfg, formats=choose_formats(cfg, dtype))
    if dtype == MXFP4:
        plain = named_leaves(family(cfg).param_specs(cfg))
        inputs = {
            own: spec.shape[-1] for own, spec in plain.items() if spec.axes[0] == "expert" and len(spec.shape) == 3
        }
        if not inputs or any(count % MXFP4_GROUP for count in inputs.values()):
            raise ConfigError(f"dtype is mxfp4, but {name} has no experts whose inputs 32 divides")
        formats = {own: Format(FLOAT4, count // MXFP4_GROUP, POWERS) for own, count in inputs.items()}
        return Subject(name=name, cfg=cfg, formats=formats)
    return Subject(name=name, cfg=cfg, dtype=dtype or "bfloat16")
