"""Options that several commands have."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer


def options_of(kind: Any, given: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Returns those of a command's options, its `locals()`, that are fields of a dataclass; `own` win over them."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given} | own


QuantizeOption = Annotated[
    str | None,
    typer.Option(help="Matrices in int8 or float8_e4m3fn; keep or auto: as the checkpoint has them; none: in full"),
]
ModelArgument = Annotated[str | None, typer.Argument(help="Folder, .gguf file or Hugging Face id")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, gpu, cuda:1, tpu:0, …")]
MeshOption = Annotated[str | None, typer.Option(help="Devices along the axes, such as model=4,data=2")]
CapacityOption = Annotated[int | None, typer.Option(help="Positions a sequence can reach")]
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
