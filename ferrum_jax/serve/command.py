"""`ferrum-jax serve`."""

import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ferrum_jax import cli_options
from ferrum_jax.contract.errors import ConfigError, UnsupportedError
from ferrum_jax.serve.settings import ServerSettings

NEEDED = ("starlette", "uvicorn", "httptools", "pydantic", "prometheus_client")


def serve(
    model: cli_options.ModelArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any that is free")] = 8000,
    served_model_name: Annotated[
        str, typer.Option(help="What clients call the model [default: its id, or the name of its folder or file]")
    ] = "",
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that requests must bring; may be given several times")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with a key in each line, which `ps` does not show")
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Answers that may wait for a row; others get a 429")
    ] = ServerSettings.max_waiting,
    max_seconds: Annotated[float, typer.Option(help="Seconds that a request may take")] = ServerSettings.max_seconds,
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds that requests have to end when the server stops")
    ] = ServerSettings.drain_seconds,
    max_body_bytes: Annotated[int, typer.Option(help="Bytes of a request")] = ServerSettings.max_body_bytes,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt [default: the KV capacity]")] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of browser pages that may call; may be given several times")
    ] = None,
    generation_config: Annotated[
        str, typer.Option(help="auto: defaults of sampling are what the model's files recommend; none: they are not")
    ] = "auto",
    tool_parser: Annotated[
        str, typer.Option(help="How the model writes calls: hermes, llama3, mistral, gpt_oss, none, or auto")
    ] = "auto",
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of a LoRA adapter; may be given several times")
    ] = None,
    adapter_root: Annotated[
        str, typer.Option(help="Folder from which adapters may be loaded over HTTP [default: none may]")
    ] = "",
    trainer_endpoints: Annotated[
        bool, typer.Option("--trainer-endpoints", help="Open /pause, /resume, /update_weights, /reset_prefix_cache")
    ] = False,
    max_seqs: cli_options.SequencesOption = None,
    kv_capacity: cli_options.CapacityOption = None,
    memory_fraction: cli_options.MemoryOption = None,
    kv_blocks: cli_options.BlocksOption = None,
    max_step_tokens: cli_options.StepTokensOption = None,
    prefix_cache: cli_options.PrefixOption = None,
    max_loras: cli_options.MaxLorasOption = 0,
    max_lora_rank: cli_options.MaxLoraRankOption = 0,
    dtype: cli_options.DtypeOption = None,
    device: cli_options.DeviceOption = None,
    mesh: cli_options.MeshOption = None,
    quantize: cli_options.QuantizeOption = None,
    layout: cli_options.LayoutOption = None,
    tokenizer: cli_options.TokenizerOption = None,
    speculate: cli_options.SpeculateOption = None,
    warmup: Annotated[bool, typer.Option(help="Compile everything before the first request")] = True,
) -> None:
    """Serve a model over OpenAI's HTTP API."""
    given = locals()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"serving needs {', '.join(missing)}, which is not installed: they are the extra `serve`, as in "
            "pip install -e '.[serve]'"
        )
    own = cli_options.options_of(
        ServerSettings,
        given,
        model=served_model_name,
        api_keys=(*(api_key or ()), *_keys_in(api_key_file)),
        allow_origins=tuple(allow_origin or ()),
        adapters=_named_folders(adapter or ()),
    )
    settings = ServerSettings(**own)
    if (settings.adapters or adapter_root) and not (max_loras and max_lora_rank):
        raise ConfigError(
            "--adapter and --adapter-root need --max-loras and --max-lora-rank, which are "
            f"{max_loras} and {max_lora_rank}"
        )
    if len(settings.adapters) > max_loras:
        raise ConfigError(f"--adapter names {len(settings.adapters)} adapters, --max-loras is {max_loras}")
    from ferrum_jax.config import EngineConfig
    from ferrum_jax.generate.llm import LLM
    from ferrum_jax.generate.speculation import Speculation
    from ferrum_jax.serve.server import Server, bind, url_of

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)  # it tells of every backend that is not there
    speculation = None if speculate is None else Speculation(num_tokens=speculate)
    beside: dict[str, Any] = {"device": device, "tokenizer": tokenizer, "speculation": speculation}
    engine = cli_options.options_of(EngineConfig, given, prefix_cache=cli_options.reuses_prefixes(prefix_cache))
    with bind(host, port) as bound, LLM(model, **beside, **engine) as llm:
        server = Server(llm, settings)
        if warmup:
            llm.warmup()
        gc.collect()
        gc.freeze()  # later collections skip these objects: all answers wait for a collection
        print(f"{server.service.name} on {url_of(host, bound.getsockname()[1])}", file=sys.stderr, flush=True)
        # uvicorn raises the signal that ended it again, when this handler is back.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        server.run([bound])


def _keys_in(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(os.path.expanduser(path)).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"the API keys in {path} cannot be read: {problem}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if wrong := [str(at) for at, line in enumerate(lines, start=1) if len(line.split()) > 1]:
        raise ConfigError(f"{path} has spaces within a key, in line {', '.join(wrong)}: each line is one key")
    if not keys:
        raise ConfigError(f"{path} has no API key: leave out --api-key-file to let anybody call the server")
    return keys


def _named_folders(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder:
            raise ConfigError(f"--adapter is {one!r}, expected NAME=FOLDER")
        if name in found:
            raise ConfigError(f"--adapter names {name!r} twice, for {found[name]} and {folder}")
        found[name] = folder
    return found
