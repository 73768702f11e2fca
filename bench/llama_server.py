"""llama.cpp's own server over the same weights in float32, with as many slots as there are rows."""

import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

import numpy as np

LONGEST_START = 120.0  # seconds


class LlamaServer:
    """A process of `llama-server`; leaving the context stops it and removes its copy of the weights."""

    def __init__(self, executable: Path, model: Path, *, rows: int, capacity: int):
        """Takes the program, a GGUF file, the sequences that run at a time, and the positions of each."""
        self._executable, self._model, self._rows, self._capacity = executable, model, rows, capacity
        self.host, self.port = "127.0.0.1", _free_port()

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        copy = Path(self._folder.name, "float32.gguf")
        dequantise(self._model, copy)
        sizes = {"parallel": self._rows, "ctx-size": self._rows * self._capacity, "threads": os.cpu_count() or 1}
        where = {"model": copy, "host": self.host, "port": self.port}
        options = [text for name, value in (where | sizes).items() for text in (f"--{name}", str(value))]
        self._log = Path(self._folder.name, "log")
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen([self._executable, *options], stdout=log, stderr=subprocess.STDOUT)
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _wait(self) -> None:
        """Waits until it answers; raises SystemExit with its last words where it does not."""
        end = time.monotonic() + LONGEST_START
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{self.host}:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        said = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
        self.__exit__()
        raise SystemExit(f"llama-server did not start: {said}")


def dequantise(source: Path, target: Path) -> None:
    """Copies a GGUF file with every tensor in float32, vocabulary and all."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

    reader = GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, str(arch))
    left_out = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith(left_out):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
