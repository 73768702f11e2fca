"""llama.cpp over the same float32 weights, through the low-level calls of llama-cpp-python.

As many threads as cores, for one token and for many; a context of its own for each row of the table, no larger than the
row needs; whole prompts in one logical batch. Both run with and without flash attention, prefill also with physical
batches of 128 and of 512 tokens (`n_ubatch`). Without it, keys and values are float32 like the weights; with it they
are float16, llama.cpp's own choice, as it would otherwise cast all of them in every step. Batches are filled before
they are timed. The package is no dependency of this one: see docs/benchmarks.md.
"""

import ctypes
import functools
import importlib
import itertools
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import gguf_copy
from bench.models import Subject
from bench.timing import Contestant

PLAIN, FLASH = "plain", "flash, float16 KV"
ATTENTIONS = {PLAIN: (0, "GGML_TYPE_F32"), FLASH: (1, "GGML_TYPE_F16")}  # llama_flash_attn_type, type of the KV
UBATCHES = (128, 512)  # tokens

_Row = tuple[int, Sequence[int], int]  # sequence, tokens, position of the first


@functools.cache
def _library() -> tuple[Any, Any]:
    """Loads llama.cpp, silenced; the callback beside it must outlive every model, which logs when it is freed."""
    lib: Any = importlib.import_module("llama_cpp")
    lib.llama_backend_init()
    silence = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silence, ctypes.c_void_p())
    return lib, silence


def quantise_file(source: Path, target: Path, file_type: str) -> None:
    """Quantises a GGUF file to one of llama.cpp's file types, such as Q4_K_M."""
    lib, _ = _library()
    prefix = "LLAMA_FTYPE_MOSTLY_"
    if not hasattr(lib, prefix + file_type):
        known = sorted(name.removeprefix(prefix) for name in dir(lib) if name.startswith(prefix))
        raise SystemExit(f"--file-type is {file_type}, llama.cpp has {', '.join(known)}")
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(lib, prefix + file_type), os.cpu_count() or 1
    if code := lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
        raise RuntimeError(f"llama_model_quantize to {file_type} gave {code}")


def _has_amx() -> bool:
    """Whether the processor has AMX; llama.cpp 0.3.36 crashes in its own use of it, with quantised weights."""
    path = Path("/proc/cpuinfo")
    return path.exists() and "amx_tile" in path.read_text(encoding="utf-8")


class LlamaCppPeer:
    """One model of llama.cpp, read from a temporary file that is gone afterwards, or from one that is there."""

    def __init__(self, subject: Subject, platform: str, file: Path | None = None, kept: str = "F32"):
        """Loads a subject with matrices of GGML's type `kept`, or `file`, which has the model in formats of its own."""
        if platform != "cpu" or subject.dtype != "float32":
            raise NotImplementedError(f"it is compared in float32 on a CPU, this is {subject.dtype} on a {platform}")
        self._lib, _ = _library()
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers, params.load_mode = 0, self._lib.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = not _has_amx()
        with tempfile.TemporaryDirectory() as folder:
            path = file or Path(folder, "weights.gguf")
            if file is None:
                gguf_copy.write(subject, path, kept)
            self._model = self._lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {subject.name}")
        weakref.finalize(self, self._lib.llama_model_free, self._model)
        self._vocab_size = subject.config.vocab_size
        self._in_full = file is None and kept == "F32"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, as they are kept."""
        return self._lib.llama_model_size(self._model)

    def prefill(self, tokens: list[int]) -> dict[str, Contestant]:
        """A prompt into an empty cache, by attention and size of a physical batch."""
        found = {}
        sizes = [size for size in UBATCHES if size <= len(tokens)] or [UBATCHES[0]]
        for attention, size in itertools.product(ATTENTIONS, sizes):
            context = self._context(1, len(tokens), attention, size)
            run = context.ready([(0, tokens, 0)])
            found[f"{attention}, ubatch {size}"] = Contestant(run, context.clear)
        return found

    def decode(self, prompts: list[list[int]], token: int, *, burst: int) -> dict[str, Contestant]:
        """A token for each of some sequences of one length, by attention."""
        found, length = {}, len(prompts[0])
        for attention in ATTENTIONS:
            context = self._context(len(prompts), length + 1, attention, UBATCHES[-1])
            for sequence, ids in enumerate(prompts):
                context.ready([(sequence, ids, 0)])()
            run = context.ready([(sequence, [token], length) for sequence in range(len(prompts))])
            found[attention] = Contestant(run, lambda context=context: context.truncate(length), burst)
        return found

    def generate(self, prompts: list[list[int]], count: int) -> dict[str, Contestant]:
        """A server's loop: prompts one after the other, then one token of every sequence in a step, by attention."""
        found, length = {}, len(prompts[0])
        for attention in ATTENTIONS:
            context = self._context(len(prompts), length + count, attention, UBATCHES[-1])

            def answer(context: _Context = context) -> NDArray[np.int64]:
                last = [context.ready([(row, ids, 0)])().argmax(axis=-1) for row, ids in enumerate(prompts)]
                chosen = [np.concatenate(last)]
                for at in range(length, length + count - 1):
                    step = [(row, [int(token)], at) for row, token in enumerate(chosen[-1])]
                    chosen.append(context.ready(step)().argmax(axis=-1))
                return np.stack(chosen, axis=1)

            found[attention] = Contestant(answer, context.clear)
        return found

    def precision(self, kind: str) -> str:
        """Returns int8 unless weights are float32: products round activations to it. Then float16 where the KV is."""
        if not self._in_full:
            return "int8"
        return "float16" if kind.startswith(FLASH) else "float32"

    def _context(self, sequences: int, positions: int, attention: str, ubatch: int) -> "_Context":
        params = self._lib.llama_context_default_params()
        params.n_seq_max, params.n_ctx = sequences, sequences * positions
        params.n_batch, params.n_ubatch = max(positions, ubatch), ubatch
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        params.flash_attn_type, kept = ATTENTIONS[attention]
        params.type_k = params.type_v = getattr(self._lib, kept)
        params.kv_unified = False  # sequences share nothing: each attends to its own positions alone
        params.no_perf = True
        return _Context(self, self._lib, self._model, params, self._vocab_size)


class _Context:
    """Some sequences' keys and values, freed with it."""

    def __init__(self, owner: LlamaCppPeer, lib: Any, model: Any, params: Any, vocab_size: int):
        self._owner = owner  # the model must not be freed before
        self._lib = lib
        self._pointer = lib.llama_init_from_model(model, params)
        if not self._pointer:
            raise RuntimeError("llama.cpp makes no context of these settings")
        weakref.finalize(self, lib.llama_free, self._pointer)
        self._memory = lib.llama_get_memory(self._pointer)
        self._sequences = params.n_seq_max
        self._vocab_size = vocab_size

    def ready(self, rows: Sequence[_Row]) -> Callable[[], NDArray[np.float32]]:
        """Fills a batch and gives the call that runs it: the logits of each row's last token, `[B, V]`."""
        entries = [
            (token, start + at, sequence, at + 1 == len(tokens))
            for sequence, tokens, start in rows
            for at, token in enumerate(tokens)
        ]
        batch = self._lib.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for at, (token, position, sequence, is_last) in enumerate(entries):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, is_last
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        wanted = [at for at, (*_, is_last) in enumerate(entries) if is_last]

        def run() -> NDArray[np.float32]:
            code = self._lib.llama_decode(self._pointer, batch)
            if code:
                raise RuntimeError(f"llama_decode of {len(entries)} tokens gave {code}")
            pointers = [self._lib.llama_get_logits_ith(self._pointer, at) for at in wanted]
            return np.stack([np.ctypeslib.as_array(pointer, (self._vocab_size,)) for pointer in pointers])

        weakref.finalize(run, self._lib.llama_batch_free, batch)
        return run

    def truncate(self, length: int) -> None:
        """Rolls every sequence back."""
        for sequence in range(self._sequences):
            if not self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1):
                raise RuntimeError(f"llama.cpp cannot roll sequence {sequence} back to {length} positions")

    def clear(self) -> None:
        """Forgets every sequence; the memory stays as it is."""
        self._lib.llama_memory_clear(self._memory, False)
