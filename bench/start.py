"""How long from process start to the first token: the first start, which compiles, and later ones, which load?

Each start is a process of its own, with the default warm-up and artifacts in a folder that the first one finds empty.
It says when it began to run, had imported JAX and then the rest, had read the weights, had loaded and was warm, and had
the first token, and counts what JAX compiled and traced, whoever asked for it. `beyond` is the whole less importing JAX
and reading the weights. With `--smoke` a tiny random model in a folder of its own starts.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import tokenizers
from safetensors.numpy import save_file

from bench import card, models
from ferrum_jax.models.specs import named_leaves
from ferrum_jax.weights import hub

STARTS = 4  # the first and three later ones
ENGINE = {"smoke": {"max_seqs": 1, "kv_capacity": 64}, "default": {}}
PROMPT = [504, 3575, 282, 4649, 314]
CHILD = """
import json, sys, time
marks, work = {"began": time.time()}, {"compiles": 0, "traces": 0}
import jax
marks["jax"] = time.time()
EVENTS = {"/jax/core/compile/backend_compile_duration": "compiles", "/jax/core/compile/jaxpr_trace_duration": "traces"}
def listen(event, seconds, **_):
    if event in EVENTS:
        work[EVENTS[event]] += 1
jax.monitoring.register_event_duration_secs_listener(listen)
from ferrum_jax import LLM, SamplingParams, loading
marks["imports"] = time.time()
open_checkpoint, read, reading = loading.open_checkpoint, loading._read, [0.0]
def timed(function):
    def run(*args):
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            reading[0] += time.perf_counter() - started
    return run
import ferrum_jax.generate.llm as llm_module
llm_module.open_checkpoint, loading._read = timed(open_checkpoint), timed(read)
path, artifacts, settings, prompt = json.loads(sys.argv[1])
llm = LLM(path, artifacts=artifacts, strict=True, progress=False, **settings)
marks["load"] = time.time()
llm.warmup(progress=False)
marks["warmup"] = time.time()
llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
marks["first token"] = time.time()
stats = llm.runner.compile_stats()
told = {name: stats[name] for name in ("compiled", "loaded", "on_disk", "load_seconds")}
print(json.dumps({"marks": marks, "work": work, "weights": reading[0], "stats": told}), flush=True)
llm.close()
"""


def main() -> None:
    """Starts processes one after another and prints the table and the JSON line."""
    found = card.options(__doc__, timed=False)
    models.check_has_files(found.model)
    subject = models.read(found)
    conditions = card.show_card(subject)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "artifacts")
        path = str(_tiny_folder(subject, Path(scratch, "model")) if found.smoke else hub.resolve(found.model))
        settings = ENGINE["smoke" if found.smoke else "default"]
        prompt = [token % subject.config.vocab_size for token in PROMPT]
        del subject  # whose memory the starts need
        rows = [_start(path, folder, settings, prompt) for _ in range(2 if found.smoke else STARTS)]
        size = sum(one.stat().st_size for one in folder.rglob("*.step"))
    headings = ("start", "seconds", "python", "jax", "imports", "weights", "load", "warm-up", "first token", "beyond",
                "compiles", "traces", "load average")  # fmt: skip
    lines = [[str(at + 1), *(_shown(row[name]) for name in headings[1:])] for at, row in enumerate(rows)]
    card.show_table(headings, lines)
    print(f"{size / 1e6:.1f} MB on disk")
    card.finish("start", found, conditions, rows, artifact_bytes=size)


def _start(path: str, folder: Path, settings: dict[str, int], prompt: list[int]) -> dict[str, Any]:
    """Runs one process; its times in seconds."""
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    command = [sys.executable, "-c", CHILD, json.dumps([path, str(folder), settings, prompt])]
    began = time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(f"a start failed: {done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    marks, weights = told["marks"], told["weights"]
    times = [began, *marks.values()]
    python, jax_import, imports, load, warmup, first = (b - a for a, b in itertools.pairwise(times))
    whole = times[-1] - began
    return {
        "seconds": whole,
        "python": python,
        "jax": jax_import,
        "imports": imports,
        "weights": weights,
        "load": load - weights,
        "warm-up": warmup,
        "first token": first,
        "beyond": whole - jax_import - weights,
        **told["work"],
        **told["stats"],
        "load average": average,
    }


def _shown(value: float | int | None) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _tiny_folder(subject: models.Subject, path: Path) -> Path:
    """Writes the tiny model as a Hugging Face folder, with a word for each token."""
    path.mkdir()
    cfg = subject.config
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
             "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta",
             "tie_word_embeddings")  # fmt: skip
    config = {name: getattr(cfg, name) for name in names} | {"architectures": ["LlamaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: jax.device_get(leaf) for name, leaf in named_leaves(subject.params).items()}
    save_file(tensors, path / "model.safetensors")
    words = {f"w{token}": token for token in range(cfg.vocab_size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(path / "tokenizer.json"))
    return path


if __name__ == "__main__":
    main()
