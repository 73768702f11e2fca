"""Options that several commands have."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer

from ferrum_jax.contract.errors import RequestValidationError


def options_of(kind: Any, given: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Returns those of a command's options, its `locals()`, that are fields of a dataclass; `own` win over them."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given} | own


def reuses_prefixes(given: bool | None) -> bool:
    """Returns what --prefix-cache says, else FERRUM_PREFIX_CACHE, else True, but False with FERRUM_WINDOW_KV=1."""
    from ferrum_jax.config import EngineConfig

    engine = EngineConfig(prefix_cache=given).over_environment()
    return not engine.window_kv if engine.prefix_cache is None else engine.prefix_cache


def check_texts(texts: Mapping[str, str | None]) -> None:
    """Raises RequestValidationError, with the name of what it is, for a text of bytes that Python could not decode."""
    for name, text in texts.items():
        if any("\ud800" <= letter <= "\udfff" for letter in text or ""):
            raise RequestValidationError(f"{name} is not UTF-8")


PrefixOption = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Reuse what prompts have in common [default: yes, unless FERRUM_PREFIX_CACHE=0 or FERRUM_WINDOW_KV=1]",
    ),
]
SpeculateOption = Annotated[
    int | None, typer.Option(help="Tokens to draft at a time, by looking up what followed the same words before")
]
SequencesOption = Annotated[
    int | None,
    typer.Option(help="Sequences at a time in each replica [default: 8; on a GPU or TPU up to 64, as memory allows]"),
]
StepTokensOption = Annotated[
    int | None, typer.Option(help="Most prompt tokens in one step [default: 2048; on a CPU 1024]")
]
BlocksOption = Annotated[int | None, typer.Option(help="Blocks of the KV")]
QuantizeOption = Annotated[
    str | None,
    typer.Option(help="Matrices in int8 or float8_e4m3fn; keep or auto: as the checkpoint has them; none: in full"),
]
ModelArgument = Annotated[str | None, typer.Argument(help="Folder, .gguf file or Hugging Face id")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, gpu, cuda:1, tpu:0, …")]
MeshOption = Annotated[
    str | None, typer.Option(help="Devices along the axes, such as model=4,data=2; data makes replicas")
]
CapacityOption = Annotated[
    int | None, typer.Option(help="Positions a sequence can reach [default: the model's, up to 4096]")
]
MaxLorasOption = Annotated[int, typer.Option(help="Adapters loaded at a time")]
MaxLoraRankOption = Annotated[int, typer.Option(help="Largest rank of an adapter")]
MemoryOption = Annotated[
    float | None,
    typer.Option(help="Share of the free memory that the KV may take [default: a half; on a GPU or TPU up to 0.85]"),
]
LayoutOption = Annotated[str | None, typer.Option(help="Of the parameters: checkpoint, fused or scanned")]
TokenizerOption = Annotated[
    str | None, typer.Option(help="Folder or .gguf file of a tokenizer, where the model's own will not do")
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder, .gguf file or Hugging Face id [default: SmolLM2-135M-Instruct]"),
]
