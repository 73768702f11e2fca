"""What do activation patching, gradients and scoring cost beside transformers with hooks, autograd and a padded batch?

Patching: every layer and position of a prompt of 20 tokens, one patch of the residual stream each, from the run of
another prompt. Ours patches a row for each position in one call, which begins at the patched layer: what lies before
it is the other prompt's. Transformers runs whole forwards with a hook, one for each patch or, as ours, a row for each
position; the faster way counts. Both compute the last token's logits.
Gradients: of the mean log-likelihood of 512 tokens with respect to all parameters; memory is the most that the process
had beyond what it had before the call. `products` keeps the results of matrix products and recomputes the rest of each
layer, `remat` recomputes all of it; `scanned` ones in one loop over the layers. All but `without the option` are
compiled so that XLA keeps the barriers of recomputations, as docs/research.md says. Scoring:
`LLM.score` beside batches of like length that are padded to the longest, of passages of Python's reference manual, by
turns 64 of like length until all are scored; how far both are from transformers in float64 is told for the texts whose
scores differ most; it is one pass, whatever `--rounds` says. All answers are compared, in float32, on a CPU only.
"""

import argparse
import copy
import ctypes
import gc
import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

import ferrum_jax
from bench import card, models
from bench.timing import PAUSE, Contestant, alternate, count_compiles
from ferrum_jax.generate.tokenizer import load_tokenizer
from ferrum_jax.models.layout import SCANNED, lay_out
from ferrum_jax.weights import hub

LENGTH, SMOKE_LENGTH = 20, 5  # tokens of the prompt that is patched
TRAINED, SMOKE_TRAINED = 512, 24  # tokens whose likelihood has a gradient
KEPT = {"xla_disable_hlo_passes": "cse_barrier_expander"}  # as in docs/research.md
TEXTS, SMOKE_TEXTS = 64, 3  # to score
TURN = 64  # texts that one scores before it is the other's turn
EXACT = 16  # of them scored in float64, too: those where the two differ most
CLOSE = 1e-4  # nats
SHORTEST, LONGEST = 64, 512  # tokens of each
BATCH = 8  # texts of a padded batch
TOLERANCE = 2e-3  # of logits and log-probabilities, in float32


def main() -> None:
    """Measures the three beside transformers and prints the tables and the JSON line."""
    found = card.options(__doc__, rounds=5, more=_more)
    if (platform := jax.default_backend()) != "cpu":
        raise SystemExit(f"this compares float32 and the process's memory on a CPU, not on a {platform}")
    subject = models.read(found)
    conditions = card.show_card(subject)
    from bench.transformers_peer import TransformersPeer  # a peer is optional elsewhere

    peer = TransformersPeer(subject, platform)
    smoke, rounds = found.smoke, found.rounds
    parts = {
        "patching": lambda: _patching(subject, peer, SMOKE_LENGTH if smoke else LENGTH, rounds),
        "gradient": lambda: _gradient(subject, peer, SMOKE_TRAINED if smoke else TRAINED, rounds),
        "scoring": lambda: _scoring(subject, peer, _texts(found, subject)),
    }
    rows = [measure() for name, measure in parts.items() if name in (found.part or parts)]
    cells = [
        [row["what"], f"{row['ours_s']:.2f}", f"{row['theirs_s']:.2f}", f"{row['theirs_s'] / row['ours_s']:.2f}"]
        for row in rows
    ]
    card.show_table(("", "ours s", "transformers s", "ratio"), cells, left=("",))
    for row in (one for one in rows if "from_float64" in one):
        told = (f"{name} {difference:.1e}" for name, difference in row["from_float64"].items())
        print(f"largest difference from float64, the {row['exact']} texts that differ most: {', '.join(told)}")
    for row in (one for one in rows if "settings" in one):
        cells = [[name, f"{seconds:.2f}"] for name, seconds in row["settings"].items()]
        card.show_table(("transformers' patches", "s"), cells, left=("transformers' patches",))
    for row in (one for one in rows if "ways" in one):
        cells = [[name, f"{way['seconds']:.2f}", f"{way['mb']:.0f}"] for name, way in row["ways"].items()]
        card.show_table(("gradient", "s", "MB beyond what was there"), cells, left=("gradient",))
    card.finish("research", found, conditions, rows)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part",
        action="append",
        choices=("patching", "gradient", "scoring"),
        help="what to measure; may come again [all]",
    )
    parser.add_argument("--texts", type=card.at_least_one, help=f"texts to score [{TEXTS}]")


def _patching(subject: models.Subject, peer: Any, length: int, rounds: int) -> dict[str, Any]:
    import torch

    cfg, params, model = subject.config, subject.params, peer.module
    layers, width = cfg.num_hidden_layers, cfg.hidden_size
    corrupt = models.prompt(cfg, length, seed=1)
    run = jax.jit(partial(ferrum_jax.models.run, cfg=cfg, capture=(("resid_pre", None),)), static_argnames="logits")
    _, seen = run(params, jnp.array([models.prompt(cfg, length, seed=0), corrupt]), logits="none")
    states = jnp.stack([seen["resid_pre", layer] for layer in range(layers)], axis=1)  # [2, L, T, D]
    clean, ids = states[0], jnp.tile(jnp.array([corrupt]), (length, 1))

    @jax.jit
    def patch_layer(params: Any, states: jax.Array, layer: jax.Array) -> jax.Array:
        own, other = states[:, layer]
        patched = jnp.where(jnp.eye(length, dtype=bool)[..., None], own, other)  # [T, T, D]: row t has position t's
        begin: dict[str, Any] = {"first_layer": layer, "inputs_embeds": patched}
        return ferrum_jax.models.forward(params, ids, cfg, logits="last", **begin)[:, 0]

    theirs_clean = torch.from_numpy(np.array(clean))
    theirs_ids = torch.tensor([corrupt])

    def ours() -> list[jax.Array]:
        return [patch_layer(params, states, jnp.int32(layer)) for layer in range(layers)]

    @torch.inference_mode()
    def theirs(at_once: int) -> list[np.ndarray]:
        answers = []
        for layer, positions in itertools.product(range(layers), torch.arange(length).split(at_once)):

            def patch(module: Any, arguments: Any, named: Any, layer: int = layer, own: Any = positions) -> Any:
                states = (arguments[0] if arguments else named["hidden_states"]).clone()
                states[torch.arange(len(own)), own] = theirs_clean[layer, own]
                return ((states, *arguments[1:]), named) if arguments else ((), {**named, "hidden_states": states})

            handle = model.model.layers[layer].register_forward_pre_hook(patch, with_kwargs=True)
            rows = theirs_ids.expand(len(positions), -1)
            answers.append(model(rows, logits_to_keep=1, use_cache=False).logits[:, -1].numpy())
            handle.remove()
        return answers

    settings = {"a forward for each patch": partial(theirs, 1), "a row for each position": partial(theirs, length)}
    expected = np.concatenate([np.asarray(one) for one in ours()])
    error = max(_agree(expected, np.concatenate(patch())) for patch in settings.values())
    contestants = {"ours": Contestant(ours)} | {name: Contestant(patch) for name, patch in settings.items()}
    times = alternate(contestants, rounds=rounds)
    seconds = {name: times[name].median / 1e3 for name in settings}
    return {
        "what": f"{layers * length} patches of a prompt of {length} ({width} wide)",
        "ours_s": times["ours"].median / 1e3,
        "theirs_s": min(seconds.values()),
        "settings": seconds,
        "largest_difference": error,
    }


def _gradient(subject: models.Subject, peer: Any, length: int, rounds: int) -> dict[str, Any]:
    import torch

    cfg, params, model = subject.config, subject.params, peer.module
    tokens = models.prompt(cfg, length, seed=2)
    ids, theirs_ids = jnp.array([tokens]), torch.tensor([tokens])

    def loss(params: Any, remat: bool | str) -> jax.Array:
        logits = ferrum_jax.models.forward(params, ids, cfg, remat=remat)[:, :-1]
        picked = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    scanned = lay_out(params, cfg, SCANNED)
    ways: dict[str, tuple[Any, bool | str, Any]] = {
        "ours": (params, False, KEPT),
        "products": (params, "products", KEPT),
        "remat": (params, True, KEPT),
        "scanned products": (scanned, "products", KEPT),
        "scanned remat": (scanned, True, KEPT),
        "without the option": (params, False, None),
    }

    def step(tree: Any, remat: bool | str, options: Any) -> Callable[[], Any]:
        compiled = jax.jit(jax.value_and_grad(partial(loss, remat=remat)), compiler_options=options)
        return lambda: compiled(tree)

    steps = {name: step(*way) for name, way in ways.items()}

    def theirs() -> float:
        model.zero_grad(set_to_none=True)
        value = model(theirs_ids, labels=theirs_ids, use_cache=False).loss
        value.backward()
        return value.item()

    error = abs(float(steps["ours"]()[0]) - theirs())
    assert error < TOLERANCE, f"losses differ by {error}"
    contestants = {name: Contestant(run) for name, run in steps.items()} | {"theirs": Contestant(theirs)}
    times = alternate(contestants, rounds=rounds)
    model.zero_grad(set_to_none=True)
    memory = {name: _memory_mb(lambda run=one.run: jax.block_until_ready(run())) for name, one in contestants.items()}
    model.zero_grad(set_to_none=True)
    return {
        "what": f"gradient of the likelihood of {length} tokens",
        "ours_s": times["ours"].median / 1e3,
        "theirs_s": times["theirs"].median / 1e3,
        "ways": {name: {"seconds": times[name].median / 1e3, "mb": memory[name]} for name in contestants},
        "largest_difference": error,
    }


def _texts(found: argparse.Namespace, subject: models.Subject) -> list[list[int]]:
    """Draws passages of Python's reference manual; random tokens for a model that has no tokenizer."""
    draw = np.random.RandomState(3)
    count = SMOKE_TEXTS if found.smoke else found.texts or TEXTS
    sizes = draw.randint(*((8, 20) if found.smoke else (SHORTEST, LONGEST)), count)
    if found.smoke or found.model in models.CONFIGURATIONS:
        return [models.prompt(subject.config, int(size), seed=at) for at, size in enumerate(sizes)]
    manual = load_tokenizer(hub.resolve(found.model)).encode("\n\n".join(topics.values()))
    starts = [draw.randint(len(manual) - size) for size in sizes]
    return [manual[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _scoring(subject: models.Subject, peer: Any, texts: list[list[int]]) -> dict[str, Any]:
    import torch

    model = peer.module
    texts = sorted(texts, key=len, reverse=True)  # so that batches of the peer's have little padding
    with models.run(subject, ferrum_jax.EngineConfig(max_seqs=8, kv_capacity=max(map(len, texts)))) as runner:
        llm = ferrum_jax.LLM.from_model(runner)

        def ours(texts: Sequence[list[int]]) -> list[list[float]]:
            return [one.logprobs for one in llm.score([text[:1] for text in texts], [text[1:] for text in texts])]

        @torch.inference_mode()
        def theirs(texts: Sequence[list[int]]) -> list[list[float]]:
            found: dict[int, list[float]] = {}
            order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
            for start in range(0, len(texts), BATCH):
                rows = order[start : start + BATCH]
                most = max(len(texts[at]) for at in rows)
                ids = torch.tensor([texts[at] + [0] * (most - len(texts[at])) for at in rows])
                mask = torch.tensor([[1] * len(texts[at]) + [0] * (most - len(texts[at])) for at in rows])
                logits = torch.log_softmax(model(ids, attention_mask=mask, use_cache=False).logits[:, :-1], dim=-1)
                picked = logits.gather(-1, ids[:, 1:, None])[..., 0]
                for row, at in zip(picked, rows, strict=True):
                    found[at] = row[: len(texts[at]) - 1].tolist()
            return [found[at] for at in range(len(texts))]

        contestants = {"ours": ours, "transformers": theirs}
        found: dict[str, list[list[float]]] = {name: [] for name in contestants}
        seconds = dict.fromkeys(contestants, 0.0)
        runner.warmup(progress=True, load=True)
        for score in contestants.values():
            score(texts[:TURN])  # warms what is not declared
        turns = [texts[at : at + TURN] for at in range(0, len(texts), TURN)]
        with count_compiles() as compiled:
            for turn in track(turns, "scoring"):
                contestants = dict(reversed(contestants.items()))  # who begins takes turns, too
                for name, score in contestants.items():
                    time.sleep(PAUSE)
                    started = time.perf_counter()
                    found[name] += score(turn)
                    seconds[name] += time.perf_counter() - started
    errors = [_agree(np.array(a), np.array(b)) for a, b in zip(*found.values(), strict=True)]
    worst = np.argsort(errors)[::-1][:EXACT].tolist()
    precise, exact = copy.deepcopy(model).double(), []
    for text in [texts[at] for at in worst]:
        with torch.inference_mode():
            logits = torch.log_softmax(precise(torch.tensor([text]), use_cache=False).logits[0, :-1], dim=-1)
        exact.append(logits.gather(-1, torch.tensor(text)[1:, None])[:, 0].numpy())
    tokens = sum(map(len, texts))
    return {
        "what": f"scores of {len(texts)} texts, {tokens} tokens",
        "tokens": tokens,
        "ours_s": seconds["ours"],
        "theirs_s": seconds["transformers"],
        "compiles": len(compiled),
        "largest_difference": max(errors),
        "texts_within": {str(CLOSE): float(np.mean(np.array(errors) <= CLOSE))},
        "exact": len(exact),
        "from_float64": {
            name: max(float(np.abs(scores[at] - one).max()) for at, one in zip(worst, exact, strict=True))
            for name, scores in found.items()
        },
    }


def _agree(ours: np.ndarray, theirs: np.ndarray) -> float:
    error = float(np.abs(ours - theirs).max())
    assert error < TOLERANCE * max(1.0, float(np.abs(theirs).max())), f"answers differ by {error}"
    return error


def _memory_mb(call: Callable[[], Any]) -> float:
    """Megabytes that a call had at most beyond what the process had before it; Linux counts them.

    What the C library holds of former calls is given back first: it would be used again without being counted.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # forgets the peak so far
    before = _status("VmRSS")
    call()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))


if __name__ == "__main__":
    main()
