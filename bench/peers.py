"""Other engines over the same weights, where they are installed and can run here."""

import importlib.util
from typing import Protocol

from bench.models import Subject
from bench.timing import Contestant
from ferrum_jax.sharding.devices import JaxDevice

NEEDS = {"transformers": ("torch", "transformers"), "llama.cpp": ("llama_cpp", "gguf")}


class Peer(Protocol):
    """One engine with the weights loaded; a setting of it is a contestant, and the fastest one counts."""

    def prefill(self, tokens: list[int]) -> dict[str, Contestant]:
        """A prompt into an empty cache, by setting; a call gives the last token's logits, `[1, V]`."""
        ...

    def decode(self, prompts: list[list[int]], token: int, *, burst: int) -> dict[str, Contestant]:
        """A token for each of some sequences of one length, by setting; a call gives `[B, V]`."""
        ...

    def generate(self, prompts: list[list[int]], count: int) -> dict[str, Contestant]:
        """The likeliest `count` tokens after each of some prompts of one length, by setting: a call's `[B, count]`."""
        ...

    def precision(self, kind: str) -> str:
        """Returns the narrowest dtype that activations, keys or values have under one of these settings."""
        ...


def find_peers(subject: Subject, device: JaxDevice) -> tuple[dict[str, Peer], dict[str, str]]:
    """Returns the peers that can run here, and of each that cannot, why."""
    peers: dict[str, Peer] = {}
    notes: dict[str, str] = {}
    for name, packages in NEEDS.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            notes[name] = f"{' and '.join(missing)} not installed"
            continue
        try:
            peers[name] = _load(name, subject, device.platform)
        except NotImplementedError as problem:
            notes[name] = str(problem)
    return peers, notes


def _load(name: str, subject: Subject, platform: str) -> Peer:
    if name == "transformers":
        from bench.transformers_peer import TransformersPeer

        return TransformersPeer(subject, platform)
    from bench.llama_cpp_peer import LlamaCppPeer

    return LlamaCppPeer(subject, platform)
