"""Makes the logits in tests/references with transformers and PEFT, or checks that it still gives the committed ones.

    python -m scripts.make_references [--check]

Needs the extra `reference`. `tiny.npz` holds the logits of every position of the tiny models in tests/tiny.py, whose
weights both sides derive from a seed. `adapters.npz` holds those of the adapters in tests/adapters.py, each on its tiny
model, by PEFT. `smollm2.npz` holds, for four prompts of SmolLM2-135M-Instruct, the token ids;
at every position some columns of the logits, the best ones and the logarithm of the sum of exponentials (which sees
every column); and the greedy continuation with the distance of the two best logits at each of its tokens.
"""

import argparse
import inspect
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.utils import logging

from ferrum_jax.config import ModelConfig
from ferrum_jax.weights import hub
from tests import adapters, tiny

ROOT = Path(__file__).parents[1]
REFERENCES = ROOT / "tests" / "references"
STEP = 2.0**-16  # logits are rounded to multiples of this (error below 8e-6), which halves the compressed size
COLUMNS = 32  # of the vocabulary, chosen by a seed
BEST = 4
GREEDY = 64  # tokens
TOLERANCE = 1e-4  # of a fresh run against the committed one: another processor, another order of summation

TEXTS = {
    "english": (
        "The lighthouse keeper counted the ships every evening, and wrote their names in a book. On the last night of "
        "October there were none, so he wrote"
    ),
    "code": (
        "def merge(left, right):\n    merged = []\n    while left and right:\n"
        "        source = left if left[0] <= right[0] else right\n        merged.append(source.pop(0))\n    return"
    ),
    "french": (
        "Le marché ouvre à sept heures. Les pêcheurs y vendent des sardines, des moules et, quand la mer est calme, "
        "quelques homards ; à midi, il ne reste"
    ),
}
LICENSE_TOKENS = slice(200, 800)


def load_tiny(folder: Path) -> PreTrainedModel:
    """Loads a folder of tests/tiny.py, every tensor of which must have found its place."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, found = loaded
    wrong = {kind: names for kind, names in found.items() if names}
    if wrong:
        raise SystemExit(f"{folder}: transformers reads these tensors otherwise: {wrong}")
    return model.eval()


def load_adapter(folder: Path, name: str) -> PeftModel:
    """Writes an adapter of tests/adapters.py and its tiny model under `folder`; PEFT must place every tensor of it."""
    config = tiny.CONFIGS[adapters.ADAPTERS[name][0]]
    model = load_tiny(tiny.write_folder(folder / "model", config))
    adapted = PeftModel.from_pretrained(model, str(adapters.write_adapter(folder / name, name))).eval()
    found = {key.replace(".default.", ".") for key in adapted.state_dict() if ".lora_" in key}
    wrong = found ^ adapters.tensors(name, ModelConfig.from_hf(config)).keys()
    if wrong:
        raise SystemExit(f"adapter {name}: PEFT reads these tensors otherwise: {sorted(wrong)}")
    return adapted


def load_smollm2(path: Path) -> PreTrainedModel:
    """Loads a GGUF file, dequantised by transformers to float32."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def logits_of(model: PreTrainedModel | PeftModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Returns the logits of every position, `[T, V]`."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].float().numpy()


def cache_argument(model: PreTrainedModel) -> str:
    """What a model's forward calls its KV: another name from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def continue_greedily(
    model: PreTrainedModel, tokens: Sequence[int], count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Returns the next `count` most likely tokens, and how far each one's logit is above the second best."""
    chosen, gaps = [], []
    fed, cache = torch.tensor([list(tokens)]), {cache_argument(model): DynamicCache(config=model.config)}
    for _ in range(count):
        with torch.no_grad():
            out = model(fed, **cache, use_cache=True)
        values, ids = out.logits[0, -1].float().topk(2)
        chosen.append(int(ids[0]))
        gaps.append(float(values[0] - values[1]))
        fed = ids[None, :1]
    return np.array(chosen, np.int32), np.array(gaps, np.float32)


def make_tiny() -> dict[str, NDArray]:
    """Computes the contents of tiny.npz."""
    made = {}
    for name, config in tiny.CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = load_tiny(tiny.write_folder(Path(folder), config))
            made[name] = _rounded(logits_of(model, tiny.prompt(name)))
    return made


def make_adapters() -> dict[str, NDArray]:
    """Computes the contents of adapters.npz."""
    made = {}
    for name in adapters.ADAPTERS:
        with tempfile.TemporaryDirectory() as folder:
            made[name] = _rounded(logits_of(load_adapter(Path(folder), name), adapters.prompt(name)))
    return made


def make_smollm2(path: Path) -> dict[str, NDArray]:
    """Computes the contents of smollm2.npz."""
    model = load_smollm2(path)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = {name: tokenizer(text)["input_ids"] for name, text in TEXTS.items()}
    license_text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    prompts["license"] = tokenizer(license_text)["input_ids"][LICENSE_TOKENS]
    columns = np.sort(np.random.RandomState(tiny.SEED).choice(model.config.vocab_size, COLUMNS, replace=False))
    made: dict[str, NDArray] = {"columns": columns.astype(np.int32)}
    for name, tokens in prompts.items():
        logits = logits_of(model, tokens)
        best = np.argsort(-logits, axis=1)[:, :BEST]
        greedy, gaps = continue_greedily(model, tokens, GREEDY)
        made |= {
            f"{name}/tokens": np.array(tokens, np.int32),
            f"{name}/logits": _rounded(logits[:, columns]),
            f"{name}/best_ids": best.astype(np.int32),
            f"{name}/best_logits": _rounded(np.take_along_axis(logits, best, axis=1)),
            f"{name}/logsumexp": _rounded(np.logaddexp.reduce(logits.astype(np.float64), axis=1)),
            f"{name}/greedy": greedy,
            f"{name}/gaps": _rounded(gaps),
        }
    return made


def _write(path: Path, made: dict[str, NDArray]) -> None:
    arrays: dict[str, Any] = dict(made)  # one of the function's own options could bear the name of an array
    np.savez_compressed(path, **arrays)


def _rounded(values: NDArray) -> NDArray[np.float32]:
    return (np.round(values.astype(np.float64) / STEP) * STEP).astype(np.float32)


def _differences(path: Path, made: dict[str, NDArray]) -> list[str]:
    """Compares with a committed file; greedy tokens count up to the first place where two were nearly as good."""
    with np.load(path) as file:
        committed = dict(file)
    if committed.keys() != made.keys():
        return [f"{path.name}: names differ: {sorted(committed.keys() ^ made.keys())}"]
    found = []
    for name, value in made.items():
        kept = committed[name]
        if kept.shape != value.shape or kept.dtype != value.dtype:
            found.append(f"{path.name}: {name} is {value.dtype}{list(value.shape)}, was {kept.dtype}{list(kept.shape)}")
        elif name.endswith(("greedy", "gaps", "best_ids")):
            continue  # these may differ where logits tie; the logits themselves are compared
        elif (distance := np.abs(kept.astype(np.float64) - value).max()) > TOLERANCE:
            found.append(f"{path.name}: {name} differs by {distance:.2e}")
    for name in (key.removesuffix("/greedy") for key in made if key.endswith("/greedy")):
        close = np.flatnonzero(committed[f"{name}/gaps"] < 1e-3)
        count = close[0] if len(close) else GREEDY
        if not np.array_equal(committed[f"{name}/greedy"][:count], made[f"{name}/greedy"][:count]):
            found.append(f"{path.name}: {name}/greedy differs")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes tests/references, or checks them.")
    parser.add_argument("--check", action="store_true", help="compare a fresh run with the committed files")
    check = parser.parse_args().check
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    REFERENCES.mkdir(exist_ok=True)
    problems = []
    makers = {
        "tiny.npz": make_tiny,
        "adapters.npz": make_adapters,
        "smollm2.npz": lambda: make_smollm2(hub.resolve(None)),
    }
    for file, make in makers.items():
        made = make()
        path = REFERENCES / file
        if check:
            problems += _differences(path, made)
        else:
            _write(path, made)
        print(f"{path.relative_to(ROOT)}: {len(made)} arrays, {path.stat().st_size:,} bytes")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
