"""Tokenizers from the metadata of a GGUF file.

The names of pre-tokenizers are defined in llama.cpp's `llama-vocab.cpp`; where it only approximates a model's own
`tokenizer.json`, the table here follows the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ferrum_jax.contract.errors import InvalidFormatError, UnsupportedError, safe_repr

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>",
              "<|return|>", "<|call|>")  # fmt: skip

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLevelRecipe:
    """How a byte-level vocabulary cuts text before its merges apply.

    Attributes:
        splits: regular expressions applied in turn; every match and every gap between matches is a piece.
        isolates_digits: before `splits`, every numeric character becomes a piece.
        composes: text is first normalised to Unicode's NFC.
        ignores_merges: a piece that is itself a token is taken whole.
        adds_bos: the default where the file has no `add_bos_token`.
    """

    splits: tuple[str, ...]
    isolates_digits: bool = False
    composes: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT2 = ByteLevelRecipe(splits=(_GPT2_SPLIT,))
_STARCODER = ByteLevelRecipe(splits=(_GPT2_SPLIT,), isolates_digits=True)
_LLAMA3 = ByteLevelRecipe(splits=(_LLAMA3_SPLIT,), ignores_merges=True, adds_bos=True)

PRE_TOKENIZERS: Mapping[str, ByteLevelRecipe] = {
    "dbrx": ByteLevelRecipe(splits=(_LLAMA3_SPLIT,)),
    "deepseek-v3": ByteLevelRecipe(splits=_DEEPSEEK3_SPLITS),
    "gpt-4o": ByteLevelRecipe(splits=(_O200K_SPLIT,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), ByteLevelRecipe(splits=(_QWEN2_SPLIT,), composes=True)),
    "smaug-bpe": ByteLevelRecipe(splits=(_LLAMA3_SPLIT,)),
    "tekken": ByteLevelRecipe(splits=(_TEKKEN_SPLIT,), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("default", "gpt-2", "gpt2", "olmo", "phi-2"), _GPT2),
    **dict.fromkeys(("refact", "smollm", "starcoder"), _STARCODER),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), _LLAMA3),
}


def named_token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Returns the id under `tokenizer.ggml.<name>_token_id`, or None if the file has no such key."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    size = len(_require(metadata, "tokens"))
    if token_id is not None and not (type(token_id) is int and 0 <= token_id < size):
        raise InvalidFormatError(
            f"tokenizer.ggml.{name}_token_id is {safe_repr(token_id)}, expected an id from 0 to {size - 1}"
        )
    return token_id


def turn_end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the ids of tokens that end a turn by their text, whatever their types, as llama.cpp knows them.

    A file names one or two such tokens, a `generation_config.json` all of them. Where there is `<|return|>`, as in
    GPT-OSS, `<|end|>` only ends one message of a turn.
    """
    ids = {token: token_id for token_id, token in enumerate(_require(metadata, "tokens"))}
    ends = [token for token in _TURN_ENDS if not (token == "<|end|>" and "<|return|>" in ids)]
    return [ids[token] for token in ends if token in ids]


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file's metadata describes.

    Raises:
        UnsupportedError: the kind of vocabulary or its pre-tokenizer is not implemented.
        InvalidFormatError: the vocabulary contradicts itself.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedError(f"tokenizer.ggml.model is {model!r}; supported are 'gpt2' and 'llama'")
    tokens: list[str] = _require(metadata, "tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise InvalidFormatError(f"tokenizer.ggml.tokens names {len(tokens)} tokens, only {len(vocabulary)} differ")
    has_types = "tokenizer.ggml.token_type" in metadata
    types = _require(metadata, "token_type", int) if has_types else [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise InvalidFormatError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if model == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre")
        if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
            raise UnsupportedError(f"tokenizer.ggml.pre is {pre!r}; supported are {', '.join(sorted(PRE_TOKENIZERS))}")
        recipe = PRE_TOKENIZERS[pre]
        tokenizer, adds_bos = _build_byte_level(metadata, vocabulary, recipe), recipe.adds_bos
    else:
        tokenizer, adds_bos = _build_sentencepiece(metadata, vocabulary, types), True
    pairs, ends = list(zip(tokens, types, strict=True)), {tokens[token_id] for token_id in turn_end_ids(metadata)}
    special = [token for token, kind in pairs if kind in (_CONTROL, _UNKNOWN) or token in ends]
    defined = [token for token, kind in pairs if kind == _USER_DEFINED and token not in ends]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])
    bos = _framing_token(metadata, "bos", default=adds_bos)
    eos = _framing_token(metadata, "eos", default=False)
    pieces = [token for token in (bos, "$A", eos) if token is not None]
    specials = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=specials)
    return tokenizer


def prefixes_runs(metadata: Mapping[str, Any]) -> bool:
    """Whether each run of text between added tokens gets a space in front of it."""
    return metadata.get("tokenizer.ggml.model") == "llama" and _flag(metadata, "add_space_prefix", True)


def _framing_token(metadata: Mapping[str, Any], name: str, *, default: bool) -> str | None:
    """Returns the token that an encoded text has at its begin or end, if it has one."""
    token_id = named_token_id(metadata, name)
    if not _flag(metadata, f"add_{name}_token", default):
        return None
    if token_id is None:
        raise InvalidFormatError(f"the file wants {name} around every text but has no tokenizer.ggml.{name}_token_id")
    token = metadata["tokenizer.ggml.tokens"][token_id]
    if token.startswith("$") or ":" in token:  # syntax of templates
        raise UnsupportedError(f"{name} is {token!r}, which tokenizers cannot put around a text: it has a '$' or ':'")
    return token


def _build_byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int], recipe: ByteLevelRecipe) -> Tokenizer:
    # A piece may not be empty but may begin with the separator, hence the search from the second character.
    merges = [(pair[: (cut := pair.find(" ", 1))], pair[cut + 1 :]) for pair in _require(metadata, "merges")]
    tokenizer = Tokenizer(_build_bpe(vocabulary, merges, ignore_merges=recipe.ignores_merges))
    if recipe.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Digits(individual_digits=True)] if recipe.isolates_digits else []),
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in recipe.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(metadata: Mapping[str, Any], vocabulary: dict[str, int], types: list[int]) -> Tokenizer:
    architecture = str(metadata.get("general.architecture"))
    if architecture.startswith(("gemma", "phi3")):
        raise UnsupportedError(
            f"SentencePiece vocabularies of {architecture} have rules of their own: give the model's Hugging Face "
            "folder as the tokenizer (tokenizer=, --tokenizer)"
        )
    scores: list[float] = _require(metadata, "scores", float)
    if len(scores) != len(vocabulary):
        raise InvalidFormatError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary)} tokens")
    normal = {token: i for token, i in vocabulary.items() if types[i] == _NORMAL}
    unknown_id = named_token_id(metadata, "unknown")
    unknown = None if unknown_id is None else metadata["tokenizer.ggml.tokens"][unknown_id]
    bpe = _build_bpe(
        vocabulary, _merges_from_scores(normal, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    # SentencePiece puts its dummy prefix before a leading space, too, and llama.cpp puts one after each added token, as
    # it normalises each run of text between added tokens. transformers does neither with these files.
    prefixed, replace = prefixes_runs(metadata), normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefixed else replace
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(content=" ", left=1)] if prefixed else undo)
    return tokenizer


def _merges_from_scores(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    # Every cut of a token into two tokens is a merge, in descending order of score; ties go to the longer left part,
    # then the longer right part, then vocabulary order (`generate_merges` in transformers).
    merges: list[tuple[float, str, str]] = []
    for token, token_id in vocabulary.items():
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [
            (scores[token_id], left, right) for left, right in cuts if left in vocabulary and right in vocabulary
        ]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _build_bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    for left, right in merges:  # the library panics
        if left + right not in vocabulary:
            raise InvalidFormatError(f"the vocabulary is inconsistent: it merges {left!r} and {right!r} into no token")
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the library raises no narrower one
        raise InvalidFormatError(f"the vocabulary is inconsistent: {error}") from error


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    if not isinstance(value := metadata.get(f"tokenizer.ggml.{name}", default), bool):
        raise InvalidFormatError(f"tokenizer.ggml.{name} is {safe_repr(value)}, expected true or false")
    return value


def _require(metadata: Mapping[str, Any], name: str, kind: type = str) -> list[Any]:
    """Reads an array whose elements are all of one kind."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise InvalidFormatError(f"the file has no tokenizer.ggml.{name}")
    if not all(type(value) is kind for value in values):  # a boolean is no integer
        found = next(value for value in values if type(value) is not kind)
        raise InvalidFormatError(f"tokenizer.ggml.{name} holds {safe_repr(found)}, expected only {kind.__name__}")
    return values
