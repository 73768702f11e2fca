"""`ferrum-jax`: generate text, converse, serve, inspect, plan for, compile or convert a model, list devices."""

import contextlib
import io
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ferrum_jax import cli_options
from ferrum_jax.contract.errors import (
    BackendError,
    ConfigError,
    FerrumError,
    IOError,
    RequestValidationError,
    UnsupportedError,
)
from ferrum_jax.conversation import chat, print_answer
from ferrum_jax.serve.command import serve

app = typer.Typer(
    name="ferrum-jax",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # which would take [default: …] for markup, and not show it
    help=__doc__,
)


app.command()(chat)
app.command()(serve)


def main() -> None:
    """Runs the command line; an error of this package is one line on standard error and exit code 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character of the answer
    try:
        with _no_interrupt_lost():
            app()
    except FerrumError as problem:
        if sys.stderr is not None:  # None if it was closed; `print` would take standard output
            Console(stderr=True).print(f"[red]{problem.kind} error:[/red]", end=" ")
            print(problem, file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as problem:  # perhaps of standard output: errors of this package are FerrumErrors
        if sys.stderr is not None:
            print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Sends an interrupt anew that Python dropped, as it does in destructors and callbacks of the garbage collector."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not hasattr(signal, "SIGALRM"):
        yield
        return
    before = sys.unraisablehook

    def interrupt_again(dropped: "sys.UnraisableHookArgs") -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            before(dropped)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        sys.unraisablehook = before
        signal.setitimer(signal.ITIMER_REAL, 0)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads standard input")],
    model: cli_options.ModelOption = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among the k best; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the nucleus of this probability; 1 is off")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw among tokens this likely relative to the best; 0 is off")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes draws repeatable")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given several times")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message")] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Use the model's chat template, if it has one")] = True,
    dtype: cli_options.DtypeOption = None,
    device: cli_options.DeviceOption = None,
    mesh: cli_options.MeshOption = None,
    kv_capacity: cli_options.CapacityOption = None,
    memory_fraction: cli_options.MemoryOption = None,
    quantize: cli_options.QuantizeOption = None,
    layout: cli_options.LayoutOption = None,
    tokenizer: cli_options.TokenizerOption = None,
    speculate: cli_options.SpeculateOption = None,
) -> None:
    """Answer one prompt, streaming the text as it comes."""
    given = locals()
    from ferrum_jax.config import EngineConfig
    from ferrum_jax.generate.llm import LLM
    from ferrum_jax.generate.params import SamplingParams
    from ferrum_jax.generate.speculation import Speculation

    params = SamplingParams(**cli_options.options_of(SamplingParams, given, stop=tuple(stop or ())))
    text, where = (_standard_input(), "standard input") if prompt == "-" else (prompt, "the prompt")
    cli_options.check_texts({where: text, "--system": system, "--stop": "".join(stop or ())})
    speculation = None if speculate is None else Speculation(num_tokens=speculate)
    beside: dict[str, Any] = {"device": device, "tokenizer": tokenizer, "speculation": speculation}
    with LLM(model, max_seqs=1, **beside, **cli_options.options_of(EngineConfig, given)) as llm:
        templated = chat and llm.tokenizer is not None and llm.tokenizer.chat_template is not None
        if system is not None and not templated:
            raise UnsupportedError("--system needs a chat template, and none is in use")
        messages = [{"role": "system", "content": system}] if system is not None else []
        ids = llm.chat_prompt([*messages, {"role": "user", "content": text}]) if templated else text
        print_answer(llm, ids, params, Console(stderr=True), [])


def _standard_input() -> str:
    if sys.stdin is None:
        raise RequestValidationError("the prompt is -, but standard input is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as problem:
        raise RequestValidationError(
            f"standard input is not {problem.encoding}: {problem.reason} at byte {problem.start:,}"
        ) from None
    except OSError as problem:
        raise IOError(f"standard input cannot be read: {problem}") from problem


@app.command()
def inspect(model: cli_options.ModelArgument = None) -> None:
    """Show a model's architecture, its sizes and its compiled steps."""
    from ferrum_jax.config import EngineConfig
    from ferrum_jax.loading import open_checkpoint, param_specs, plan_ahead, with_defaults
    from ferrum_jax.models.backends import fallback_reason
    from ferrum_jax.models.placement import ModelPlacement
    from ferrum_jax.models.registry import family
    from ferrum_jax.models.specs import named_leaves, num_bytes, num_parameters
    from ferrum_jax.sharding.devices import default_dtype, find_device
    from ferrum_jax.weights.hub import resolve

    source = open_checkpoint(resolve(model))
    settings, placed, refusal = EngineConfig.from_environment(), None, ""
    cfg = source.config = source.config.reaching(settings.kv_capacity or 0, at_most=True)  # as `load` does
    device = find_device(None)
    try:
        placed = ModelPlacement.on_mesh(cfg, settings.mesh_sizes, device)
    except FerrumError as problem:
        refusal = str(problem)
    division = None if placed is None else placed.division
    settings = with_defaults(settings, source, device, is_divided=division is not None)
    parameters, dtype = num_parameters(family(cfg).param_specs(cfg)), settings.dtype or default_dtype(device)
    try:
        loaded = param_specs(source, settings.quantize, dtype, settings.layout or "checkpoint")
    except FerrumError:  # as the plan below will say
        loaded = param_specs(source, "none")
    dtypes = " and ".join(dict.fromkeys(leaf.dtype or dtype for leaf in named_leaves(loaded).values()))
    try:
        plan = None if placed is None else plan_ahead(settings, source, placed)
    except FerrumError as problem:
        plan, refusal = None, str(problem)
    windows = sorted({str(window) for window in cfg.layer_windows if window is not None})
    longest = cfg.reaching(cfg.max_position_embeddings).max_seq_len
    asked_for = f", up to {longest:,} with FERRUM_KV_CAPACITY" if longest > cfg.max_seq_len else ""
    rows = {
        "model": str(source.path),
        "family": cfg.model_type,
        "parameters": f"{parameters:,} ({num_bytes(loaded, dtype) / 1e6:,.0f} MB in {dtypes})",
        "layers": f"{cfg.num_hidden_layers} of width {cfg.hidden_size}, feed-forward {cfg.intermediate_size}",
        "attention": f"{cfg.num_attention_heads} heads of {cfg.head_dim}, {cfg.num_key_value_heads} key/value heads"
        + (f", window {', '.join(windows)}" if windows else ""),
        "vocabulary": f"{cfg.vocab_size:,}" + (", head tied to the embeddings" if cfg.tie_word_embeddings else ""),
        "RoPE": f"theta {cfg.rope_theta:g}, " + (cfg.rope_scaling.rope_type if cfg.rope_scaling else "no scaling"),
        "longest sequence": f"{cfg.max_seq_len:,} positions{asked_for}",
        "device": f"{device.platform}:{device.id} {device.device_kind}",
        "weights": f"layout {settings.layout}, quantize {settings.quantize}",
    }
    if plan is not None:
        own = cfg if division is None else division.local
        replicas = settings.mesh_sizes.get("data", 1)
        each = f" in each of {replicas} replicas" if replicas > 1 else ""
        rows |= {
            "attention by": plan.cache.attention if (why := fallback_reason(settings, own, device)) is None else why,
            "KV per position": f"{plan.cache.bytes_per_position:,} bytes in {plan.cache.dtype}",
            "KV pool": f"{plan.cache.num_blocks} blocks of {plan.cache.block_size} positions, "
            f"{plan.cache.num_bytes / 1e6:,.0f} MB{each}",
            "serves": f"{plan.max_seqs} sequences of up to {plan.kv_capacity:,} positions{each}",
        }
    if plan is None:
        rows["[red]refused[/red]"] = refusal
    else:
        keys, letters = plan.declared(), "P query blocks of C tokens, M KV blocks a row, R rows of logits"
        rows["steps"] = "\n".join([f"{len(keys)}: D rows of one token, {letters}", *map(str, keys)])
    _print_table(rows)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Folder, config.json, or a known name such as llama-3.1-70b")],
    device: Annotated[str, typer.Option(help="h100, h200, b200, a100, l40s, v5e, v5p or v6e")],
    mesh: Annotated[
        str | None, typer.Option(help="Devices along its axes: model=8, or data=2,expert=4,model=2")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Sequences of a replica that decode together [default: as many as fit, up to 64]")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Positions of every sequence [default: 8192, or as many as the model has]")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16, int8, float8_e4m3fn or mxfp4 [default: bfloat16]")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of cached keys and values, fp8 for 8 bits [default: that of activations]")
    ] = None,
    step_tokens: Annotated[int, typer.Option(help="Tokens of prompts in one step at most")] = 2048,
    memory_share: Annotated[float, typer.Option(help="Of a device's memory that JAX may take")] = 0.9,
    lower: Annotated[
        bool, typer.Option("--lower/--no-lower", help="Compile steps for the CPU, which tells their temporaries")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead")] = False,
) -> None:
    """Estimate what a model needs on other devices, and its speed.

    It reads the configuration alone.
    """
    import jax

    from ferrum_jax.config import EngineConfig
    from ferrum_jax.planning import temporaries
    from ferrum_jax.planning.estimate import DEFAULT_CONTEXT, Deployment, describe, estimate
    from ferrum_jax.planning.machines import find_machine
    from ferrum_jax.planning.subject import read_subject

    settings: dict[str, Any] = {"rows": rows, "kv_dtype": kv_dtype, "step_tokens": step_tokens}
    settings |= EngineConfig(mesh=mesh).mesh_sizes | {"memory_share": memory_share}
    subject, machine = read_subject(model, dtype), find_machine(device)
    longest = subject.cfg.reaching(DEFAULT_CONTEXT).max_seq_len
    settings["context"] = min(DEFAULT_CONTEXT, longest) if context is None else context
    deployment = Deployment(subject=subject, machine=machine, **settings)
    estimate(deployment)  # refuses quickly
    needed = None
    if lower:
        if jax.config.values["jax_num_cpu_devices"] < deployment.devices:
            with contextlib.suppress(RuntimeError):  # they have been counted: `measure` says how many are missing
                jax.config.update("jax_num_cpu_devices", deployment.devices)
        with Console(stderr=True).status("compiling steps of few layers for the CPU"):
            needed = temporaries.measure(deployment)
    found = estimate(deployment, needed)
    if as_json:
        print(json.dumps(found.summary()))
        return
    _print_table(describe(found))


def _print_table(rows: Mapping[str, str]) -> None:
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it was closed
    Console(width=None if is_terminal else 120).print(table, highlight=False)


@app.command("compile")
def compile_steps(
    model: cli_options.ModelArgument = None,
    max_seqs: cli_options.SequencesOption = None,
    kv_capacity: cli_options.CapacityOption = None,
    memory_fraction: cli_options.MemoryOption = None,
    kv_blocks: cli_options.BlocksOption = None,
    max_step_tokens: cli_options.StepTokensOption = None,
    prefix_cache: cli_options.PrefixOption = None,
    dtype: cli_options.DtypeOption = None,
    device: cli_options.DeviceOption = None,
    mesh: cli_options.MeshOption = None,
    quantize: cli_options.QuantizeOption = None,
    layout: cli_options.LayoutOption = None,
    max_loras: cli_options.MaxLorasOption = 0,
    max_lora_rank: cli_options.MaxLoraRankOption = 0,
    tokenizer: cli_options.TokenizerOption = None,
    speculate: cli_options.SpeculateOption = None,
    folder: Annotated[str | None, typer.Option(help="Folder of the compiled steps [default: the user's cache]")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove the steps of all models instead")] = False,
) -> None:
    """Compile all that serving a model may need, and keep it on disk.

    Later starts then compile nothing. Give the options that you will give to `serve`. For `chat` add --max-seqs 1, for
    `generate` --no-prefix-cache, too.
    """
    given = locals()
    from ferrum_jax.compile import artifacts
    from ferrum_jax.compile.artifacts import artifacts_folder
    from ferrum_jax.config import EngineConfig
    from ferrum_jax.generate.llm import LLM
    from ferrum_jax.generate.speculation import Speculation

    root = artifacts_folder(EngineConfig(artifacts=folder).over(EngineConfig.from_environment()).artifacts)
    if root is None:
        raise ConfigError("compiled steps are not stored, as FERRUM_ARTIFACTS=0 or a warning says: give --folder")
    if clear:
        if model is not None:
            raise ConfigError(f"--clear removes the steps of all models, {model} alone cannot be chosen")
        try:
            print(f"{artifacts.clear(root) / 1e6:.1f} MB removed from {root}")
        except OSError as problem:
            raise IOError(f"the steps in {root} cannot be removed: {problem}") from problem
        return
    speculation = None if speculate is None else Speculation(num_tokens=speculate)
    beside: dict[str, Any] = {"device": device, "tokenizer": tokenizer, "speculation": speculation}
    beside |= {"artifacts": str(root), "prefix_cache": cli_options.reuses_prefixes(prefix_cache)}
    with LLM(model, **cli_options.options_of(EngineConfig, given, **beside)) as llm:
        store, started = llm.runner.artifacts, time.perf_counter()
        assert store is not None
        try:
            store.check_writable()
        except OSError as problem:
            raise IOError(f"no compiled step could be stored in {root}: {problem}") from problem
        llm.warmup()
        sizes, seconds = store.listed(), time.perf_counter() - started
    if store.num_unwritten:
        raise IOError(f"{store.num_unwritten} compiled calls could not be kept in {root}: a warning says why")
    if not sizes:
        raise BackendError(f"no compiled step could be stored in {root}: a warning says why")
    new, size = store.num_saved, sum(sizes.values()) / 1e6
    print(f"{len(sizes)} calls in {store.folder.path}: {new} new, {len(sizes) - new} were there, "
          f"{size:.1f} MB, {seconds:.1f} s")  # fmt: skip


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file or Hugging Face id")],
    folder: Annotated[str, typer.Argument(help="The new folder")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 [default: the model's]")] = None,
    quantize: cli_options.QuantizeOption = None,
    tokenizer: cli_options.TokenizerOption = None,
) -> None:
    """Write a model as an Orbax checkpoint, with its tokenizer."""
    from ferrum_jax import conversion

    for name in ("SIGTERM", "SIGHUP"):  # what was written so far is removed; Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    print(conversion.convert(model, folder, dtype, quantize=quantize, tokenizer=tokenizer))


@app.command()
def devices() -> None:
    """List the devices JAX sees, their free memory, and CPU kernels."""
    import jax

    from ferrum_jax.ops import native
    from ferrum_jax.sharding.devices import AMPLE, default_dtype, find_device, free_bytes

    find_device(None)  # raises a DeviceError where a platform of JAX_PLATFORMS is missing
    print(f"jax {jax.__version__}")
    for device in jax.local_devices():
        kind, free = f"{device.platform}:{device.id}", free_bytes(device, is_needed=False)
        told = "free memory unknown" if free == AMPLE else f"{free / 1e9:.1f} GB free"
        print(f"{kind:8} {device.device_kind}  {told}  default dtype {default_dtype(device)}")
        if device.platform == "cpu":
            found = native.library()
            print(f"{'':8} kernels: {native.instruction_set() or f'none, XLA computes everything: {found}'}")


if __name__ == "__main__":
    main()
