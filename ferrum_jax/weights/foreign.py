"""Conversion of parameters between Hugging Face names and the trees of other libraries, in both directions.

A `Rule` says which part of which foreign array a parameter is, and how the axes of the two relate. Conversions consist
of slices, transposes, reshapes and concatenations, so they may be jitted: one program, without going through the host.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.core import Tracer

from ferrum_jax.config import ModelConfig
from ferrum_jax.contract.checks import check_no_problems, differences, listed
from ferrum_jax.contract.errors import ConfigError, InvalidParameterError, safe_repr
from ferrum_jax.models.layout import checkpoint_leaves
from ferrum_jax.models.registry import family
from ferrum_jax.models.specs import ParamSpec, ParamTree, from_names, name_of, named_leaves, shape_of_numbers
from ferrum_jax.ops.quantised import QuantisedWeight
from ferrum_jax.sharding.types import dividing, explicit_mesh, partition_of, with_auto_axes
from ferrum_jax.weights.assemble import specs_apart, stored_apart, stored_axes

Sizes = dict[str, int]  # of axes, by letter
_TOKENS = re.compile(r"\[[^\[\]]*\]|\([^()\[\]]*\)|[^\s()\[\]]+")
_PARTS = re.compile(r"\*?(?:\([^()]*\)|[^\s()*]+)")
_INDEX = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Rule:
    r"""Where parameters are in a foreign tree.

    Args:
        name: regular expression that matches whole names of parameters, as in a Hugging Face checkpoint.
        path: the path in the foreign tree, keys joined by dots; `\1` and `\g<L>` are groups of the expression.
        axes: foreign axes and our axes, such as `D N H -> (N H) D`: a letter is an axis, and letters in parentheses are
            one axis, their product. On the foreign side, `1/3` is index 1 of an axis of 3, and a letter that our side
            lacks is an index, the value of the expression's group of that name, into an axis of that letter's size.
            `[(N H) *(K H) (K H)]`, on either side, is the second of three parts of an axis. The letters N, K, H,
            and L are the model's numbers of heads, key/value heads, head width and layers; other letters have the size
            that fits, or a given one: `P=2`.
        scale: our parameter is the foreign array times this.
    """

    name: str
    path: str
    axes: str
    scale: float = 1.0


@dataclass(frozen=True)
class Axis:
    """One axis of an array, as a rule describes it: a product of letters, or a part of the axis."""

    letters: tuple[str, ...] = ()
    at: int = 0  # index of the rule's part
    parts: tuple[tuple[str, ...], ...] = ()  # all concatenated parts; empty if the rule is about the whole axis
    index: str = ""  # the letter whose value is an index into the axis
    count: int = 1  # length of the axis, if `at` is an index into it


@dataclass(frozen=True)
class Block:
    """A box within an array: its place along each axis, and the letters of its axes."""

    axes: tuple[Axis, ...]
    shape: tuple[int, ...]  # of the whole array
    spans: tuple[tuple[int, int], ...]  # start and length along each axis
    parts: tuple[tuple[int, int], ...]  # index and number of parts along each axis
    letters: tuple[str, ...]  # of all axes, in order
    sizes: tuple[int, ...]  # of the letters


@dataclass(frozen=True)
class Move:
    """One parameter, or a part of it, and where it is in a foreign tree."""

    name: str
    path: str
    ours: Block
    theirs: Block
    scale: float


def from_tree(tree: Any, cfg: ModelConfig, rules: Sequence[Rule]) -> ParamTree:
    """Converts a foreign tree into a tree for `from_params` and `set_params`, in the checkpoint's layout.

    Args:
        tree: an `nnx.State`, nested dicts and lists, or a flat dict whose keys are paths: joined by dots, or tuples.
        cfg: the model's configuration.
        rules: for each part of a parameter, the first rule that matches its name counts.

    Raises:
        InvalidParameterError: leaves are missing, unknown, of a wrong shape or no floating-point numbers (the message
            lists all), or PyTorch's; or `cfg` is no `ModelConfig`.
        ConfigError: a rule is malformed or contradicts the model.
    """
    leaves = named_leaves(tree)
    _refuse_torch(leaves)
    specs: dict[str, ParamSpec] = named_leaves(family(cfg).param_specs(cfg))
    moves = plan(cfg, rules)
    given = {path: shape_of_numbers(leaf) for path, leaf in leaves.items()}
    problems = differences(given, {move.path: str(list(move.theirs.shape)) for move in moves})
    check_no_problems(f"this is not the tree of this {cfg.model_type}", problems)
    found: dict[str, dict[tuple[int, ...], Any]] = {name: {} for name in specs}
    for move in moves:
        block = _moved(leaves[move.path], move.theirs, move.ours, move.scale)
        found[move.name][tuple(at for at, _ in move.ours.parts)] = block
    return from_names(family(cfg).param_specs(cfg), {name: _joined(pieces) for name, pieces in found.items()})


def to_tree(params: ParamTree, cfg: ModelConfig, rules: Sequence[Rule], *, like: Any = None) -> Any:
    """Converts parameters in any layout into a foreign tree.

    Args:
        params: the model's, not quantised.
        cfg: the model's configuration.
        rules: as for `from_tree`.
        like: a tree of the wanted structure, such as an `nnx.State`; if None, the result is nested dicts with str keys.

    Raises:
        InvalidParameterError: parameters are quantised, or `like` has other leaves; the message lists all differences.
        ConfigError: a rule contradicts the model, or rules leave out a part of a leaf, or put two parameters into one
            place.
    """
    leaves = _plain_leaves(params, cfg)
    pieces: dict[str, dict[tuple[int, ...], Any]] = {}
    moves = plan(cfg, rules)
    _check_places_apart(moves)
    for move in moves:
        block = _moved(leaves[move.name], move.ours, move.theirs, 1 / move.scale)
        pieces.setdefault(move.path, {})[tuple(at for at, _ in move.theirs.parts)] = block
    shapes = {move.path: list(move.theirs.shape) for move in moves}
    found = {path: _joined(own) for path, own in pieces.items()}
    if short := [path for path, leaf in found.items() if list(leaf.shape) != shapes[path]]:
        raise ConfigError(f"the rules leave out a part of {listed(short, ', ')}")
    if like is None:
        return unflatten_dict(found, sep=".")
    given = {name: list(jnp.shape(leaf)) for name, leaf in named_leaves(like).items()}
    check_no_problems("this tree has other leaves", differences(given, shapes))
    return jax.tree_util.tree_map_with_path(lambda path, _: found[name_of(path)], like)


def from_hf_names(flat: Mapping[str, Any], cfg: ModelConfig) -> ParamTree:
    """Builds a tree for `from_params` and `set_params` from a checkpoint's tensors by name.

    Experts may be stacked or stored one by one. A tied head and rotary tables are left out.

    Raises:
        InvalidParameterError: tensors are missing, unknown, of a wrong shape or no floating-point numbers (the message
            lists all), or PyTorch's; `flat` is no dict of named tensors, or `cfg` no `ModelConfig`; or the
            configuration ties a head that differs from the embeddings. Traced heads are not compared.
    """
    if not isinstance(flat, Mapping) or not all(isinstance(name, str) for name in flat):
        raise InvalidParameterError(f"flat is a {type(flat).__name__}, expected a dict whose keys are tensors' names")
    _refuse_torch(flat)
    specs: dict[str, ParamSpec] = named_leaves(family(cfg).param_specs(cfg))
    needless = {name for name in flat if name.endswith("rotary_emb.inv_freq")}
    needless |= {"lm_head.weight"} if cfg.tie_word_embeddings else set()
    apart = stored_apart(specs, flat)
    given = {name: leaf for name, leaf in flat.items() if name not in needless}
    found = {name: shape_of_numbers(leaf) for name, leaf in given.items()}
    wanted = {
        name: str([size for _, size in sorted(zip(spec.stored or range(len(spec.shape)), spec.shape, strict=True))])
        for name, spec in specs_apart(specs, apart).items()
    }
    check_no_problems(f"these are not the tensors of this {cfg.model_type}", differences(found, wanted))
    head, embeddings = flat.get("lm_head.weight"), flat["model.embed_tokens.weight"]
    if cfg.tie_word_embeddings and head is not None and not _are_same(head, embeddings):
        raise InvalidParameterError(
            "lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings is true: "
            "dataclasses.replace(cfg, tie_word_embeddings=False) keeps both"
        )
    leaves = {name: jnp.stack([flat[part] for part in parts]) for name, parts in apart.items()}
    leaves |= {name: flat[name] for name in specs if name not in apart}
    leaves |= {name: jnp.transpose(leaves[name], axes) for name, axes in stored_axes(specs).items()}
    return from_names(family(cfg).param_specs(cfg), leaves)


def _refuse_torch(leaves: Mapping[str, Any]) -> None:
    for name, leaf in leaves.items():
        if type(leaf).__module__.partition(".")[0] == "torch":
            raise InvalidParameterError(
                f"{name} is a torch.{type(leaf).__name__}: give arrays, jnp.asarray(t.detach().float().numpy())"
            )


def _are_same(one: Any, other: Any) -> bool:
    """Returns True for equal arrays, and if one is traced."""
    if one is other or isinstance(one, Tracer) or isinstance(other, Tracer):
        return True
    return bool(jnp.array_equal(jnp.asarray(one), jnp.asarray(other)))


def to_hf_names(params: ParamTree, cfg: ModelConfig) -> dict[str, Any]:
    """Converts parameters in any layout into a checkpoint's tensors by name, with experts as a checkpoint stores them.

    Raises:
        InvalidParameterError: parameters are quantised.
    """
    specs: dict[str, ParamSpec] = named_leaves(family(cfg).param_specs(cfg))
    leaves = _plain_leaves(params, cfg)
    for name, axes in stored_axes(specs).items():
        leaves[name] = jnp.transpose(leaves[name], [axes.index(axis) for axis in range(len(axes))])
    for name, parts in stored_apart(specs, {}).items():
        leaves |= dict(zip(parts, leaves.pop(name), strict=True))
    return leaves


def _plain_leaves(params: ParamTree, cfg: ModelConfig) -> dict[str, Any]:
    leaves = checkpoint_leaves(params, cfg)
    if quantised := [name for name, leaf in leaves.items() if isinstance(leaf, QuantisedWeight)]:
        raise InvalidParameterError(
            f"{len(quantised)} parameters are quantised, {quantised[0]} the first: models.dequantise gives plain ones"
        )
    return leaves


def plan(cfg: ModelConfig, rules: Iterable[Rule]) -> list[Move]:
    """Returns where each parameter of a model, or each part of it, is in a foreign tree.

    Raises:
        ConfigError: a rule is malformed or contradicts the model, or no rule matches a parameter or a part of it.
    """
    specs: dict[str, ParamSpec] = named_leaves(family(cfg).param_specs(cfg))
    if not isinstance(rules, Iterable):
        raise ConfigError(f"rules are {safe_repr(rules)}, expected a list of Rule")
    rules = list(rules)
    if wrong := [rule for rule in rules if not isinstance(rule, Rule)]:
        raise ConfigError(f"{safe_repr(wrong[0])} is no Rule")
    read = [(rule, _compiled(rule), *_read(rule)) for rule in rules]
    heads, keys, size, layers = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, cfg.num_hidden_layers
    known = {"N": heads, "K": keys, "H": size, "L": layers}
    moves: list[Move] = []
    left_out: list[str] = []
    for name, spec in specs.items():
        taken: set[tuple[tuple[int, int], ...]] = set()
        covered = 0  # numbers
        for rule, expression, theirs, ours, given in read:
            match = expression.fullmatch(name)
            if match is None or covered == math.prod(spec.shape):
                continue
            sizes = _fit(rule, name, ours, spec.shape, known | given)
            indices = {letter: int(value) for letter, value in match.groupdict().items() if (value or "").isdigit()}
            here, there = (_block(rule, name, axes, sizes, indices) for axes in (ours, theirs))
            if sorted(here.letters) != sorted(there.letters):
                raise ConfigError(f"rule {rule.name!r}: its sides have different axes: {rule.axes!r}")
            if here.shape != spec.shape:
                raise ConfigError(
                    f"rule {rule.name!r}: {name} has shape {list(spec.shape)}, its axes say {list(here.shape)}"
                )
            if here.parts not in taken:
                taken.add(here.parts)
                covered += math.prod(size for _, size in here.spans)
                moves.append(Move(name, _expanded(rule, match), here, there, rule.scale))
        parts = math.prod(count for _, count in next(iter(taken), ((0, 1),)))
        if len(taken) != parts or covered != math.prod(spec.shape):
            left_out.append(name)
    if left_out:
        raise ConfigError(f"the rules do not say where all of {listed(left_out, ', ')} is")
    return moves


def _compiled(rule: Rule) -> re.Pattern[str]:
    for part in (rule.name, rule.path, rule.axes):
        if not isinstance(part, str):
            raise ConfigError(f"rule {rule.name!r}: {safe_repr(part)} is no text, as its name, path and axes are")
    try:
        scale = 0.0 if isinstance(rule.scale, str) else float(rule.scale)
    except (OverflowError, TypeError, ValueError):
        scale = 0.0
    if not scale or not math.isfinite(scale):
        raise ConfigError(f"rule {rule.name!r}: its scale is {rule.scale!r}, expected a finite number other than 0")
    try:
        return re.compile(rule.name)
    except re.error as problem:
        raise ConfigError(f"rule {rule.name!r}: its name is no regular expression: {problem}") from None


def _expanded(rule: Rule, match: re.Match[str]) -> str:
    try:
        return match.expand(rule.path)
    except (re.error, IndexError) as problem:
        raise ConfigError(f"rule {rule.name!r}: its path {rule.path!r} cannot be filled in: {problem}") from None


def _check_places_apart(moves: Sequence[Move]) -> None:
    """Raises ConfigError if rules put two parameters, or parts of them, into one place, or one below another."""
    boxes: dict[str, list[Move]] = {}
    for move in moves:
        for other in boxes.setdefault(move.path, []):
            spans = zip(move.theirs.spans, other.theirs.spans, strict=False)
            if all(at < start + length and start < at + size for (at, size), (start, length) in spans):
                raise ConfigError(f"the rules put {other.name} and {move.name} into one place, {move.path}")
        boxes[move.path].append(move)
    for path, (move, *_) in boxes.items():
        keys = path.split(".")
        if above := next((".".join(keys[:n]) for n in range(1, len(keys)) if ".".join(keys[:n]) in boxes), None):
            raise ConfigError(f"the rules put {boxes[above][0].name} at {above} and {move.name} below it, at {path}")


def _read(rule: Rule) -> tuple[tuple[Axis, ...], tuple[Axis, ...], Sizes]:
    """Parses the axes of a rule: foreign axes, our axes, and the given sizes."""
    given: Sizes = {}
    there, arrow, here = rule.axes.partition("->")
    if not arrow:
        raise ConfigError(f"rule {rule.name!r}: its axes are {rule.axes!r}, expected a text such as 'D F -> F D'")

    def cut(text: str, pieces: re.Pattern[str]) -> list[str]:
        found = pieces.findall(text)
        if "".join("".join(found).split()) != "".join(text.split()):
            raise ConfigError(f"rule {rule.name!r}: brackets do not match, or a star marks nothing, in {rule.axes!r}")
        return found

    def letters(text: str) -> tuple[str, ...]:
        found = []
        for word in text.strip("()").split():
            letter, _, size = word.partition("=")
            if not letter.isalpha() or not (size.isdigit() or "=" not in word):
                raise ConfigError(f"rule {rule.name!r}: {word!r} is no axis in {rule.axes!r}")
            given.update({letter: int(size)} if size else {})
            found.append(letter)
        return tuple(found)

    def axis(token: str) -> Axis:
        if match := _INDEX.fullmatch(token):
            if int(match[1]) >= int(match[2]):
                raise ConfigError(f"rule {rule.name!r}: {token!r} is index {match[1]} of an axis of {match[2]}")
            return Axis(at=int(match[1]), count=int(match[2]))
        if not token.startswith("["):
            return Axis(letters=letters(token))
        words = cut(token[1:-1], _PARTS)
        starred = [at for at, word in enumerate(words) if word.startswith("*")]
        if len(starred) != 1:
            raise ConfigError(f"rule {rule.name!r}: expected that one part of {token!r} has a star, which marks it")
        parts = tuple(letters(word.removeprefix("*")) for word in words)
        return Axis(letters=parts[starred[0]], at=starred[0], parts=parts)

    ours = tuple(axis(token) for token in cut(here, _TOKENS))
    known = {letter for one in ours for letter in one.letters}
    theirs = []
    for token in cut(there, _TOKENS):
        one = axis(token)
        is_index = len(one.letters) == 1 and not one.parts and one.letters[0] not in known
        theirs.append(Axis(index=one.letters[0]) if is_index else one)
    return tuple(theirs), ours, given


def _fit(rule: Rule, name: str, axes: Sequence[Axis], shape: Sequence[int], sizes: Sizes) -> Sizes:
    """Adds the sizes of letters that a parameter's shape determines."""
    found = dict(sizes)
    if len(axes) != len(shape):
        raise ConfigError(f"rule {rule.name!r}: {name} has {len(shape)} axes, the rule {len(axes)}: {rule.axes!r}")
    for axis, size in zip(axes, shape, strict=True):
        unknown = [letter for letter in axis.letters if letter not in found]
        if len(unknown) == 1 and not axis.parts:
            found[unknown[0]] = size // math.prod(found[letter] for letter in axis.letters if letter in found)
    return found


def _block(rule: Rule, name: str, axes: Sequence[Axis], sizes: Sizes, indices: Sizes) -> Block:
    try:
        extents, spans, parts = [], [], []
        for axis in axes:
            own = math.prod(sizes[letter] for letter in axis.letters)
            if axis.index:
                if (at := indices[axis.index]) >= sizes[axis.index]:
                    raise ConfigError(
                        f"rule {rule.name!r}: {name} would be index {at} of {axis.index}, which has {sizes[axis.index]}"
                    )
                extents.append(sizes[axis.index])
                spans.append((indices[axis.index], 1))
                parts.append((indices[axis.index], sizes[axis.index]))
            elif axis.parts:
                lengths = [math.prod(sizes[letter] for letter in part) for part in axis.parts]
                extents.append(sum(lengths))
                spans.append((sum(lengths[: axis.at]), own))
                parts.append((axis.at, len(lengths)))
            else:
                extents.append(own * axis.count)
                spans.append((axis.at, own))
                parts.append((axis.at, axis.count))
    except KeyError as unknown:
        raise ConfigError(f"rule {rule.name!r}: nothing says the size or index of {unknown} for {name}") from None
    letters = tuple(letter for axis in axes for letter in axis.letters)
    return Block(
        tuple(axes), tuple(extents), tuple(spans), tuple(parts), letters, tuple(sizes[letter] for letter in letters)
    )


def _moved(array: Any, source: Block, target: Block, scale: float) -> Any:
    """Copies a box out of an array with the axes of another box; explicit mesh axes shard it where they divide it."""
    mesh = explicit_mesh(array)
    if mesh is None:
        return _move(array, source, target, scale)
    given = zip(source.axes, (*partition_of(array), *(None,) * len(source.axes)), strict=False)
    by_letter = {axis.letters[0]: names for axis, names in given if axis.letters}
    wanted = [by_letter.get(axis.letters[0]) if axis.letters else None for axis in target.axes]
    spec = dividing([length for _, length in target.spans], wanted, mesh)
    return with_auto_axes(lambda own: _move(own, source, target, scale), array, out_specs=spec, mesh=mesh)


def _move(array: Any, source: Block, target: Block, scale: float) -> Any:
    if source.parts != tuple((0, 1) for _ in source.parts):
        array = array[tuple(slice(start, start + length) for start, length in source.spans)]
    array = jnp.reshape(array, source.sizes)
    array = jnp.transpose(array, [source.letters.index(letter) for letter in target.letters])
    array = jnp.reshape(array, [length for _, length in target.spans])
    return array if scale == 1.0 else (array.astype(jnp.float32) * scale).astype(array.dtype)


def _joined(pieces: Mapping[tuple[int, ...], Any], axis: int = 0) -> Any:
    """Concatenates boxes, given each one's index of parts along every axis."""
    if len(pieces) == 1:
        return next(iter(pieces.values()))
    groups: dict[int, dict[tuple[int, ...], Any]] = {}
    for parts, piece in pieces.items():
        groups.setdefault(parts[axis], {})[parts] = piece
    joined = [_joined(groups[at], axis + 1) for at in sorted(groups)]
    if len(joined) == 1:
        return joined[0]
    return with_auto_axes(lambda *own: jnp.concatenate(own, axis=axis), *joined, out_specs=partition_of(joined[0]))
