"""The command line, in this process: what it prints where, and how it ends."""

import contextlib
import io
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import typer
from gguf import GGMLQuantizationType

import ferrum_jax
from ferrum_jax import LLM, SamplingParams, cli
from ferrum_jax.compile.artifacts import SUFFIX
from ferrum_jax.compile.private_folder import PrivateFolder
from ferrum_jax.config import EngineConfig
from ferrum_jax.contract.errors import ConfigError
from ferrum_jax.generate.speculation import Speculation
from ferrum_jax.models.layout import layout_of
from ferrum_jax.weights import orbax
from tests import tiny
from tests.generate.test_request import letters
from tests.weights.test_gguf import QUANTISED, WHOLE_BLOCKS, write_gguf

CONFIG: dict[str, Any] = tiny.CONFIGS["llama3"] | {"vocab_size": 23, "num_hidden_layers": 1}
Run = Callable[..., tuple[int, str, str]]
SMALL = ("--max-tokens", "5", "--kv-capacity", "32", "cab")  # whose steps are compiled once for all tests


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture
def run(steps: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `ferrum-jax` with arguments; returns its exit code, output and errors."""
    monkeypatch.setenv("FERRUM_ARTIFACTS", str(steps))  # so that each step is compiled once for all tests

    def run(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ferrum-jax", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capfd.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.write_folder(tmp_path_factory.mktemp("models") / "[tiny]", CONFIG)
    letters().backend.save(str(path / "tokenizer.json"))
    return path


def refused(result: tuple[int, str, str], kind: str, *says: str) -> None:
    """Demands one line on standard error, nothing else, and exit code 1."""
    code, out, err = result
    assert code == 1
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert err.startswith(f"{kind} error: ")
    assert all(text in err for text in says)


@pytest.mark.slow
def test_a_quantised_model_is_converted_and_generates_the_same(run: Run, folder: Path, tmp_path: Path):
    run("convert", folder, tmp_path / "made", "--quantize", "int8")
    answers = [run("generate", "-m", path, *more, *SMALL)[1] for path, *more in (
        (tmp_path / "made",), (folder, "--quantize", "int8"))]  # fmt: skip
    assert answers[0] == answers[1] != ""


@pytest.mark.slow
def test_a_quantised_model_is_converted_and_inspected(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    code, out, _ = run("convert", folder, tmp_path / "made", "--quantize", "int8")
    assert (code, out) == (0, f"{tmp_path / 'made'}\n")
    assert "in int8 and float32" in run("inspect", tmp_path / "made")[1]
    assert "MB in float32)" in run("inspect", folder)[1]
    monkeypatch.setenv("FERRUM_QUANTIZE", "float8_e4m3fn")
    assert "in float8_e4m3fn and float32" in run("inspect", folder)[1]
    refused(run("generate", "-m", tmp_path / "made", "cab"), "Config", "quantised already (int8)")


@pytest.mark.slow
def test_generate_prints_the_answer_and_then_the_figures_apart(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    with LLM(folder, max_seqs=1, kv_capacity=32, engine=EngineConfig(block_tokens=32), progress=False) as llm:
        greedy = llm.generate("cab", SamplingParams(max_tokens=9))[0].text
        code, out, err = run("generate", "-m", folder, "--max-tokens", "9", "--kv-capacity", "32", "cab")
        assert (code, out) == (0, greedy + "\n")
        assert "9 tokens" in err
        assert "3 prompt tokens" in err
        assert "length" in err

        drawn = SamplingParams(max_tokens=9, temperature=2.0, top_k=9, top_p=0.9, min_p=0.01, seed=3)
        sampled = llm.generate("cab", drawn)[0].text
        assert greedy != sampled
        loaded: list[tuple[str, dict[str, Any]]] = []

        def compiled_already(model: str, **settings: Any) -> contextlib.nullcontext[LLM]:
            loaded.append((model, settings))
            return contextlib.nullcontext(llm)

        monkeypatch.setattr("ferrum_jax.generate.llm.LLM", compiled_already)
        monkeypatch.setattr(sys, "stdin", io.StringIO("cab"))
        options = ["--temperature", "2", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--seed", "3"]
        place = ["--model", "m", "--dtype", "float32", "--device", "cpu", "--kv-capacity", "32", "--max-tokens", "9"]
        place += ["--speculate", "2", "--quantize", "int8", "--layout", "fused", "--tokenizer", "t"]
        code, out, err = run("generate", *place, *options, "--stop", sampled[4:7], "--stop", "!", "--", "-")
        assert (code, out) == (0, sampled.partition(sampled[4:7])[0] + "\n")
        assert "stop" in err
        assert loaded == [("m", {"dtype": "float32", "device": "cpu", "kv_capacity": 32, "max_seqs": 1,
                                    "mesh": None, "memory_fraction": None,
                                    "quantize": "int8", "layout": "fused", "tokenizer": "t",
                                    "speculation": Speculation(num_tokens=2)})]  # fmt: skip


@pytest.mark.slow
def test_generate_speculates_where_it_is_asked_to(run: Run, folder: Path):
    options = ["-m", folder, "--max-tokens", "20", "--kv-capacity", "32", "cab"]
    _, plain, err = run("generate", *options)
    assert "drafted" not in err
    code, out, err = run("generate", *options, "--speculate", "3")
    assert (code, out) == (0, plain)
    assert "drafted tokens accepted" in " ".join(err.split())


def test_generate_refuses_what_it_cannot_do(run: Run, folder: Path, tmp_path: Path):
    model = ["--model", folder]
    refused(run("generate", "cab", *model, "--top-p", "2"), "InvalidParameter", "top_p is 2.0")
    refused(run("generate", "cab", *model, "--max-tokens", "0"), "InvalidParameter", "max_tokens is 0")
    refused(run("generate", "cab", *model, "--speculate", "0"), "InvalidParameter", "num_tokens is 0")
    refused(run("generate", "cab", *model, "--dtype", "int3"), "Config", "dtype is 'int3'")
    refused(run("generate", "cab", *model, "--device", "tpu:0"), "Device", "tpu:0")
    refused(run("generate", "cab", *model, "--kv-capacity", "2"), "RequestValidation", "3")
    refused(run("generate", "", *model, "--kv-capacity", "32"), "RequestValidation", "at least")
    refused(run("generate", "cab", *model, "--system", "x", "--kv-capacity", "32"), "Unsupported", "chat template")
    refused(run("generate", "cab", "--model", tmp_path / "nowhere"), "NotFound", "nowhere")
    (tmp_path / "config.json").write_text("{")
    refused(run("generate", "cab", "--model", tmp_path), "InvalidFormat", "config.json is not JSON")


def test_a_prompt_on_standard_input_that_is_no_text_is_refused(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ca\xffb"), encoding="utf-8"))
    says = ("standard input is not utf-8: invalid start byte at byte 2",)
    refused(run("generate", "-", "-m", folder), "RequestValidation", *says)
    bytes_of_C = io.TextIOWrapper(io.BytesIO(b"ca\xffb"), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", bytes_of_C)  # as with LC_ALL=C
    refused(run("generate", "-", "-m", folder), "RequestValidation", "standard input is not UTF-8")
    for arguments, name in ((["a\udcff"], "the prompt"), (["a", "--system", "\udcff"], "--system"),
                            (["a", "--stop", "\udcff"], "--stop")):  # fmt: skip
        refused(run("generate", *arguments, "-m", folder), "RequestValidation", f"{name} is not UTF-8")
    refused(run("chat", folder, "--system", "\udcff"), "RequestValidation", "--system is not UTF-8")
    monkeypatch.setattr(sys, "stdin", None)
    refused(run("generate", "-", "-m", folder), "RequestValidation", "standard input is closed")


def test_a_table_is_not_printed_where_standard_output_is_closed(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdout", None)
    assert run("inspect", folder) == (0, "", "")


@pytest.mark.slow
def test_a_model_without_a_tokenizer_of_its_own_takes_another(run: Run, folder: Path, tmp_path: Path):
    file = write_gguf(tmp_path / "m.gguf", CONFIG)
    refused(run("generate", "-m", file, *SMALL), "Unsupported", "tokenizer.ggml.model is None")
    expected = run("generate", "-m", folder, *SMALL)[1]
    assert run("convert", file, tmp_path / "made", "--tokenizer", folder)[0] == 0
    for model in ((file, "--tokenizer", folder), (tmp_path / "made",)):
        assert run("generate", "-m", *model, *SMALL)[:2] == (0, expected)
    refused(run("generate", "-m", file, "--tokenizer", tmp_path / "none", *SMALL), "NotFound", "none")


def test_a_corrupted_model_is_one_line_that_names_the_file(run: Run, folder: Path, tmp_path: Path):
    broken = tiny.write_folder(tmp_path / "broken", CONFIG)
    letters().backend.save(str(broken / "tokenizer.json"))
    whole = (broken / "model.safetensors").read_bytes()
    for contents in (whole[:-100], b"", b"\xff" * 64):
        (broken / "model.safetensors").write_bytes(contents)
        for command in (["generate", "cab", "--model", broken], ["inspect", broken]):
            refused(run(*command), "InvalidFormat", "model.safetensors is not a whole safetensors file")
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF" + b"\x00" * 50)
    refused(run("inspect", gguf), "InvalidFormat", "broken.gguf")


def test_the_share_of_memory_is_an_option_of_what_loads_a_model(run: Run, folder: Path):
    for command in (("generate", "cab", "-m"), ("chat",), ("serve", "--port", "0"), ("compile",)):
        refused(
            run(*command, folder, "--memory-fraction", "1.5"), "Config", "memory_fraction is 1.5, expected at most 1"
        )


@pytest.mark.parametrize("command", ["serve", "compile", "chat"])
def test_prefixes_are_reused_unless_an_option_or_else_the_variable_says_no(
    command: str, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def load(model: str, **settings: Any):
        raise ConfigError(f"prefix_cache={settings['prefix_cache']}")

    monkeypatch.setattr("ferrum_jax.generate.llm.LLM", load)
    port = ("--port", "0") if command == "serve" else ()
    refused(run(command, folder, *port), "Config", "prefix_cache=True")
    monkeypatch.setenv("FERRUM_PREFIX_CACHE", "0")
    refused(run(command, folder, *port), "Config", "prefix_cache=False")
    if command != "chat":
        refused(run(command, folder, *port, "--prefix-cache"), "Config", "prefix_cache=True")
        monkeypatch.delenv("FERRUM_PREFIX_CACHE")
        refused(run(command, folder, *port, "--no-prefix-cache"), "Config", "prefix_cache=False")
    monkeypatch.delenv("FERRUM_PREFIX_CACHE", raising=False)
    monkeypatch.setenv("FERRUM_WINDOW_KV", "1")  # there cannot be both
    refused(run(command, folder, *port), "Config", "prefix_cache=False")


def test_inspect_shows_the_architecture_and_the_plan(run: Run, folder: Path):
    code, out, err = run("inspect", folder)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    for says in (
        "family llama", "1 of width 48, feed-forward 72", "8 heads of 20, 2 key/value heads", "theta 500000",
        "[tiny]", "longest sequence 160 positions", "steps", "D8 P0x0", "weights layout", "quantize", "attention by",
    ):  # fmt: skip
        assert says in text
    count = sum(tensor.size for tensor in tiny.tensors(CONFIG).values())
    assert f"parameters {count:,} ({count * 4 / 1e6:,.0f} MB in float32)" in text


def test_inspect_shows_what_load_would_refuse(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch):
    count = sum(tensor.nbytes for tensor in tiny.tensors(CONFIG).values())
    monkeypatch.setattr("ferrum_jax.sharding.mesh.free_bytes", lambda _: count)
    code, out, err = run("inspect", folder)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "family llama" in text
    assert "0 free bytes" in text
    assert "steps" not in text


def test_inspect_shows_what_a_mesh_will_be_served(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tiny.write_folder(tmp_path, CONFIG | {"num_hidden_layers": 2})
    layouts = []
    for mesh in ("model=1", "model=2"):
        monkeypatch.setenv("FERRUM_MESH", mesh)
        with ferrum_jax.load(path, max_seqs=1, kv_capacity=16, progress=False) as runner:
            layouts.append(layout_of(runner.params))
        out = run("inspect", path)[1]
        assert f"layout {layouts[-1]}," in " ".join(out.split())
    assert layouts[1] == "checkpoint"
    monkeypatch.setenv("FERRUM_MESH", "data=2")
    monkeypatch.setenv("FERRUM_PAGED_MAX_SEQS", "3")
    told = " ".join(run("inspect", path)[1].split())
    assert "MB in each of 2 replicas" in told
    assert "serves 3 sequences of up to 160 positions in each of 2 replicas" in told
    monkeypatch.setenv("FERRUM_MESH", "model=64")
    assert "64 devices" in " ".join(run("inspect", path)[1].split())


def test_inspect_describes_a_file_whose_type_is_not_supported(run: Run, tmp_path: Path):
    raw = {QUANTISED: (np.zeros((256, 512 // 256 * 292), np.uint8), GGMLQuantizationType.Q8_K)}
    code, out, err = run("inspect", write_gguf(tmp_path / "model.gguf", WHOLE_BLOCKS, raw=raw))
    assert (code, err) == (0, "")
    assert "family qwen2" in " ".join(out.split())


def test_inspect_shows_windows_scalings_and_ties(run: Run, tmp_path: Path):
    out = run("inspect", tiny.write_folder(tmp_path / "a", tiny.CONFIGS["mistral_yarn"]))[1]
    assert ", window 11" in out
    assert "yarn" in out
    assert "tied" not in out
    out = run("inspect", tiny.write_folder(tmp_path / "b", tiny.CONFIGS["mistral_full_tied"]))[1]
    assert ", window" not in out
    assert "head tied to the embeddings" in out


def test_inspect_shows_the_positions_of_longrope_that_load_would_serve(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tiny.write_folder(tmp_path, tiny.CONFIGS["phi3_beyond"])
    text = " ".join(run("inspect", folder)[1].split())
    assert f"longest sequence {tiny.ORIGINAL} positions, up to 160 with FERRUM_KV_CAPACITY" in text
    assert f"of up to {tiny.ORIGINAL} positions" in text
    monkeypatch.setenv("FERRUM_KV_CAPACITY", "100")
    text = " ".join(run("inspect", folder)[1].split())
    assert "longest sequence 160 positions" in text
    assert "of up to 100 positions" in text


def test_convert_writes_a_folder_that_answers_the_same(run: Run, folder: Path, tmp_path: Path):
    made = tmp_path / "new" / "folder"
    assert run("convert", folder, made) == (0, f"{made}\n", "")
    answers = [run("generate", "-m", model, *SMALL)[1] for model in (folder, made)]
    assert answers[0] == answers[1] != "\n"
    refused(run("convert", folder, made), "AlreadyExists", "not empty")
    refused(run("convert", folder, tmp_path / "other", "--dtype", "int8"), "Config", "int8")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_conversion_that_is_terminated_leaves_nothing(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    def interrupted(path: Path, *_: Any) -> None:
        path.mkdir()
        signal.raise_signal(number)

    monkeypatch.setattr(orbax, "save", interrupted)
    before = [(one, signal.signal(one, signal.SIG_DFL)) for one in (signal.SIGTERM, signal.SIGHUP)]
    try:
        assert run("convert", folder, tmp_path / "made")[0] == 128 + number
        assert list(tmp_path.iterdir()) == []
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
        monkeypatch.undo()
        assert run("convert", folder, tmp_path / "made")[0] == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for one, found in before:
            signal.signal(one, found)


INTERRUPTED = """
import gc, signal, time
from ferrum_jax import cli

class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def app():
    print("began", flush=True)
    if WHERE == "destructor":
        Dropped()
    else:
        def collected(phase, _):
            gc.callbacks.remove(collected)
            signal.raise_signal(signal.SIGINT)
        gc.callbacks.append(collected)
        gc.collect()
    time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
cli.app = app
cli.main()
"""


@pytest.mark.parametrize("where", ["destructor", "garbage collector"])
def test_an_interrupt_that_python_drops_is_sent_anew(where: str):
    code = INTERRUPTED.replace("WHERE", repr(where))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, "began\n", "")


def test_devices_lists_what_jax_sees(run: Run):
    before = sys.unraisablehook
    code, out, err = run("devices")
    assert (code, err) == (0, "")
    assert sys.unraisablehook is before
    assert out.startswith("jax ")
    assert "cpu:0" in out
    assert "default dtype float32" in out


@pytest.mark.parametrize("command", [("devices",), ("plan", "llama-3.1-8b", "--device", "h100")])
def test_a_platform_that_is_missing_is_one_line(run: Run, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    def absent(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, absent)
    refused(run(*command), "Device", "Unable to initialize backend 'tpu'")


@pytest.mark.parametrize(
    "command", [(), ("generate",), ("inspect",), ("plan",), ("compile",), ("convert",), ("devices",)]
)
def test_help_names_the_commands_and_options(run: Run, command: tuple[str, ...]):
    code, out, _ = run(*command, "--help")
    assert code == 0
    expected = {(): "inspect", ("generate",): "--max-tokens", ("inspect",): "Folder", ("devices",): "memory"}
    expected |= {("convert",): "--dtype", ("compile",): "--clear", ("plan",): "--mesh"}
    assert expected[command] in out


@pytest.mark.parametrize("name", sorted(typer.main.get_group(cli.app).commands))
def test_help_has_every_text_whole(run: Run, name: str):
    shown = "".join(run(name, "--help")[1].split())
    for option in typer.main.get_group(cli.app).commands[name].params:
        assert "".join((getattr(option, "help", None) or "").split()) in shown


def test_the_list_of_commands_has_every_sentence_whole(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in run("--help")[1].partition("Commands:")[2]


def test_a_wrong_option_is_a_usage_error(run: Run):
    code, out, err = run("generate", "--nonsense", "x")
    assert code == 2
    assert out == ""
    assert "--nonsense" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("problem", [ConfigError("wrong"), OSError("broken")])
def test_errors_are_not_told_on_standard_output_where_standard_error_is_closed(
    problem: Exception, run: Run, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> None:
        raise problem

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "stderr", None)
    assert run("devices") == (1, "", "")


def test_an_interrupt_ends_quietly(run: Run, monkeypatch: pytest.MonkeyPatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    assert run("devices") == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compile_keeps_the_steps_says_where_and_clears_them(
    whole: bool, run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not whole:  # fewer steps
        monkeypatch.setattr(LLM, "warmup", lambda llm, **_: llm.prepare([1, 2], SamplingParams(max_tokens=2)))
    options = ("compile", folder, "--max-seqs", "1", "--kv-capacity", "8", "--folder", tmp_path / "kept")
    code, out, _ = run(*options)
    assert code == 0
    kept = sorted((tmp_path / "kept").rglob("*.step"))
    assert out.startswith(f"{len(kept)} calls in {kept[0].parent}: {len(kept)} new, 0 were there, ")
    assert run(*options)[1].startswith(f"{len(kept)} calls in {kept[0].parent}: 0 new, {len(kept)} were there, ")
    monkeypatch.setenv("FERRUM_ARTIFACTS", str(tmp_path / "kept"))
    with LLM(folder, max_seqs=1, kv_capacity=8, progress=False, strict=True) as llm:
        llm.warmup(progress=False)
        llm.generate("ca", SamplingParams(max_tokens=2))
        assert llm.runner.compile_stats()["compiled"] == 0
    code, out, _ = run("compile", "--clear")
    assert code == 0
    assert out.endswith(f" MB removed from {tmp_path / 'kept'}\n")
    assert not list((tmp_path / "kept").rglob("*.step"))


def test_compile_refuses_what_it_cannot_do(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FERRUM_ARTIFACTS", "0")
    refused(run("compile", folder), "Config", "FERRUM_ARTIFACTS=0", "--folder")
    refused(run("compile", folder, "--clear", "--folder", tmp_path), "Config", "all models")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    refused(run("compile", "--clear", "--folder", tmp_path / "open"), "IO", "may be written by others")
    refused(run("compile", folder, "--folder", tmp_path / "open"), "IO", "no compiled step could be stored")
    refused(run("compile", tmp_path / "nowhere", "--folder", tmp_path / "new"), "NotFound", "no model at")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_compile_fails_where_there_is_no_place_for_a_step(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = PrivateFolder.write

    def full(self: PrivateFolder, name: str, *parts: bytes) -> None:
        if name.endswith(SUFFIX):
            raise OSError(28, "No space left on device")
        write(self, name, *parts)

    monkeypatch.setattr(PrivateFolder, "write", full)
    monkeypatch.setattr(LLM, "warmup", lambda llm: llm.prepare([1, 2], SamplingParams(max_tokens=2)))  # fewer steps
    options = ("compile", folder, "--max-seqs", "1", "--kv-capacity", "8", "--folder", tmp_path / "kept")
    refused(run(*options), "IO", "compiled calls could not be kept in", str(tmp_path / "kept"))
