"""Text to token ids and back, from a Hugging Face folder or a GGUF file."""

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import tokenizers

from ferrum_jax.contract.decoding import Sampling
from ferrum_jax.contract.errors import (
    ConfigError,
    InvalidFormatError,
    InvalidParameterError,
    NotFoundError,
    TokenizerError,
    UnsupportedError,
    safe_repr,
)
from ferrum_jax.generate.chat import render_chat
from ferrum_jax.generate.gguf_tokenizer import build_gguf_tokenizer, named_token_id, prefixes_runs, turn_end_ids
from ferrum_jax.weights.folder import read_json, read_text
from ferrum_jax.weights.gguf_file import GgufFile

_log = logging.getLogger(__name__)
_OTHER_VOCABULARIES = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MARKS = ("bos_token", "eos_token", "pad_token", "unk_token")
GENERATION = "generation_config.json"
_HF_SETTINGS = {one.name: one.name for one in dataclasses.fields(Sampling)}  # names there, by our own
_GGUF_SETTINGS = {name: f"general.sampling.{name}" for name in ("top_k", "top_p", "min_p")}
_GGUF_SETTINGS |= {"temperature": "general.sampling.temp", "repetition_penalty": "general.sampling.penalty_repeat"}
_LONG = 1 << 14  # characters or ids, of which the tokenizer takes some 20 ms
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tokenizer:
    """A vocabulary, with the special tokens and chat templates of a model's files.

    Attributes:
        backend: the tokenizer of `tokenizers`; shared, so do not change it.
        eos_token_ids: ids that end a generation, those of the model's configuration first; empty if there are none.
        bos_token: text of the token that begins a sequence.
        eos_token: text of the token that ends one.
        pad_token: text of the padding token.
        unk_token: text of the token for characters that the vocabulary cannot spell.
        chat_templates: Jinja sources by name.
        recommended: the settings of `Sampling` that the model's files recommend, by name.
        prefixes_runs: each run of text between added tokens gets a space in front, which `decode` removes.
        added: added tokens by id.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    eos_token_ids: tuple[int, ...] = ()
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict, repr=False)
    recommended: Mapping[str, float] = field(default_factory=dict)
    prefixes_runs: bool = False
    added: Mapping[int, tokenizers.AddedToken] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lists the added tokens."""
        object.__setattr__(self, "added", self.backend.get_added_tokens_decoder())

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Reads a Hugging Face folder; only `tokenizer.json` is required.

        Raises:
            NotFoundError: there is no such folder, or no tokenizer in it.
            UnsupportedError: there is a vocabulary, but in another form than `tokenizer.json`.
            InvalidFormatError: a file is malformed; the message names it.
        """
        folder = Path(path)
        backend = _read_backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        named = _read_json(folder / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
        texts = {name: _token_text(named.get(name)) for name in _MARKS}
        _add_tokens(backend, folder, config, named)
        eos_token_ids = _model_eos_ids(folder)
        if texts["eos_token"] and (eos_token_id := backend.token_to_id(texts["eos_token"])) is not None:
            eos_token_ids += (eos_token_id,)
        return cls(
            backend=backend,
            eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
            chat_templates=_read_templates(folder, config),
            recommended=_recommended(_read_json(folder / GENERATION), _HF_SETTINGS, folder / GENERATION),
            prefixes_runs=config.get("prefixes_runs") is True,  # which `save` writes
            **texts,
        )

    @classmethod
    def from_gguf(cls, source: str | Path | GgufFile) -> Self:
        """Reads the vocabulary of a GGUF file, given its path or an open file; does not read its tensors.

        Raises:
            NotFoundError: there is no such file.
            UnsupportedError: its kind of vocabulary or pre-tokenizer is not implemented.
            InvalidFormatError: it is not a GGUF file, or its vocabulary contradicts itself.
        """
        opened = source if isinstance(source, GgufFile) else GgufFile(Path(source))
        path, metadata = opened.path, opened.metadata
        try:
            backend = build_gguf_tokenizer(metadata)
            ids = {n: named_token_id(metadata, n) for n in ("bos", "eos", "eot", "eom", "padding", "unknown")}
            ends = turn_end_ids(metadata)
        except (InvalidFormatError, UnsupportedError) as error:
            raise type(error)(f"{path}: {error}") from error
        texts = {name: None if i is None else metadata["tokenizer.ggml.tokens"][i] for name, i in ids.items()}
        prefix = "tokenizer.chat_template"
        templates = {k.removeprefix(prefix + "."): v for k, v in metadata.items() if k.startswith(prefix + ".")}
        if prefix in metadata:
            templates["default"] = metadata[prefix]
        for name, template in templates.items():
            if not isinstance(template, str):
                raise InvalidFormatError(f"{path}: {prefix} is {safe_repr(template)} for {name}, expected a text")
        return cls(
            backend=backend,
            eos_token_ids=tuple(dict.fromkeys(i for i in (ids["eos"], ids["eot"], ids["eom"], *ends) if i is not None)),
            bos_token=texts["bos"],
            eos_token=texts["eos"],
            pad_token=texts["padding"],
            unk_token=texts["unknown"],
            chat_templates=templates,
            recommended=_recommended(metadata, _GGUF_SETTINGS, path),
            prefixes_runs=prefixes_runs(metadata),
        )

    def save(self, folder: Path) -> None:
        """Writes the files from which `from_folder` reads this tokenizer again."""
        texts = {name: getattr(self, name) for name in _MARKS}
        config: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
        config |= {"prefixes_runs": True} if self.prefixes_runs else {}
        named = [{"name": name, "template": template} for name, template in self.chat_templates.items()]
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        _write_json(folder / "tokenizer_config.json", config | ({"chat_template": named} if named else {}))
        draws = {"do_sample": self.recommended.get("temperature", 1) > 0} if self.recommended else {}
        _write_json(folder / GENERATION, {"eos_token_id": list(self.eos_token_ids)} | draws | dict(self.recommended))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's logits may have more columns."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """The default chat template, if there is one."""
        return self.chat_templates.get("default")

    def template_for(self, *, tools: bool) -> str | None:
        """The chat template of conversations with or without tools; with them the one named `tool_use` comes first."""
        return self.chat_templates.get("tool_use", self.chat_template) if tools else self.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`; special tokens spelled out in it become their ids.

        Args:
            text: the text to encode.
            add_special_tokens: also add the special tokens that the model expects around a text.
        """
        try:
            if len(text) > _LONG:  # as a batch: other threads run meanwhile
                return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            wrong = re.search("[\ud800-\udfff]", text) if isinstance(text, str) else None
            shown = text[max(0, wrong.start() - 20) :] if wrong else text
            raise TokenizerError(f"text must be a str of valid Unicode, found {shown!r:.80}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD, ids beyond the vocabulary are skipped."""
        try:
            if not self.prefixes_runs:
                return self._decoded(list(ids), skip_special_tokens)
            texts: list[str] = []
            for added, run in itertools.groupby(ids, self.added.get):
                if added is None:
                    texts.append(self._decoded(list(run)))  # without the prefix
                elif not (added.special and skip_special_tokens):
                    texts += [added.content for _ in run]
            return "".join(texts)
        except (OverflowError, TypeError) as error:
            raise TokenizerError(f"ids must be integers from 0 to 2^32 - 1, found {ids!r:.80}") from error

    def _decoded(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if len(ids) > _LONG:  # as a batch: other threads run meanwhile
            return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """Renders a conversation with the chat template; options and errors are those of `render_chat`.

        Raises:
            UnsupportedError: there is no template.
        """
        template = self.template_for(tools=options.get("tools") is not None)
        if template is None:
            raise UnsupportedError("this model has no chat template")
        marks = {name: text for name in _MARKS if (text := getattr(self, name)) is not None}
        return render_chat(template, messages, **(marks | options))

    def id_to_token(self, token_id: int) -> str | None:
        """Returns the vocabulary's spelling of a token, or None for an id that it does not have."""
        try:
            return self.backend.id_to_token(token_id)
        except (OverflowError, TypeError) as error:
            raise TokenizerError(f"a token id must be an integer from 0 to 2^32 - 1, found {token_id!r:.80}") from error

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token, given the vocabulary's spelling, or None if there is no such token."""
        return self.backend.token_to_id(token)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face folder or of a `.gguf` file.

    Raises:
        ConfigError: `path` is empty, or neither a str nor an `os.PathLike`.
        NotFoundError: there is nothing at `path`.
        UnsupportedError: it is neither, or its kind of tokenizer is not implemented.
        InvalidFormatError: a file is malformed.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"tokenizer is {safe_repr(path)}, expected the path of one")
    if not os.fspath(path):
        raise ConfigError("tokenizer is '', expected the path of one")
    path = Path(os.path.expanduser(path))
    if os.path.isdir(path):
        return Tokenizer.from_folder(path)
    if not os.path.exists(path):
        raise NotFoundError(f"{path}: no such file or folder, or it may not be read")
    if path.suffix.lower() != ".gguf":
        raise UnsupportedError(f"{path}: a tokenizer is read from a folder with tokenizer.json or from a .gguf file")
    return Tokenizer.from_gguf(path)


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    if not os.path.isdir(folder):
        raise NotFoundError(f"{folder}: no such folder")
    file = folder / "tokenizer.json"
    try:
        text = read_text(file)
    except NotFoundError:
        others = [name for name in _OTHER_VOCABULARIES if (folder / name).is_file()]
        if not others:
            raise NotFoundError(f"{folder}: there is no tokenizer.json") from None
        raise UnsupportedError(
            f"{folder}: found {', '.join(others)} but no tokenizer.json; convert it once with "
            "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        ) from None
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # the library raises no narrower one than Exception, or panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidFormatError(f"{file}: not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON file; returns an empty mapping if it does not exist."""
    try:
        return read_json(file)
    except NotFoundError:
        return {}


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], named: Mapping[str, Any]
) -> None:
    """Adds the tokens that a folder has beyond `tokenizer.json`, by their ids, and then those declared special.

    As in transformers 5, `special_tokens_map.json` declares further ones and `added_tokens.json` counts only where
    `tokenizer_config.json` has no `added_tokens_decoder`, and the frame of a text is that of `tokenizer.json`, whatever
    `add_bos_token` and `add_eos_token` say.
    """
    source, is_complete = folder / "tokenizer_config.json", "added_tokens_decoder" in config
    try:
        names = {*config, *_NAMED} if is_complete else named.keys()
        special, further = _special_tokens({name: named.get(name) for name in named if name in names})
    except (KeyError, TypeError) as error:
        raise InvalidFormatError(f"{folder}: extra_special_tokens or additional_special_tokens: {error!r}") from error
    if is_complete:
        try:
            declared = sorted((int(key), value) for key, value in config["added_tokens_decoder"].items())
            added = [_added_token(value) for _, value in declared]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidFormatError(f"{source}: added_tokens_decoder: {error!r}") from error
    else:
        added = _read_added_tokens(folder / "added_tokens.json", {token.content for token in further})
    for token in added:
        token.special |= any(token.content == one.content for one in special)
    found = {token.content for token in backend.get_added_tokens_decoder().values()}
    for group in (added, special, further):  # a token that exists already keeps its flags
        backend.add_tokens([token for token in group if token.content not in found])
        found |= {token.content for token in group}


def _special_tokens(
    named: Mapping[str, Any],
) -> tuple[list[tokenizers.AddedToken], list[tokenizers.AddedToken]]:
    """Reads the named and the unnamed special tokens, in the order in which new ones get ids."""
    own = [key for key in named if key.endswith("_token") and key not in _NAMED]  # a family's, such as image_token
    values = [named[key] for key in (*_NAMED, *own) if _token_text(named.get(key)) is not None]
    extra = named.get("extra_special_tokens")
    if isinstance(extra, dict):
        values, extra = [*values, *extra.values()], None
    further = extra or named.get("additional_special_tokens") or []
    if not isinstance(further, list):
        raise TypeError(f"expected a list of tokens, found {safe_repr(further)}")

    def special(values: list[Any]) -> list[tokenizers.AddedToken]:
        return [_added_token({"content": v} if isinstance(v, str) else v, special=True) for v in values]

    return special(values), special(further)


def _added_token(value: Mapping[str, Any], **flags: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(value["content"], **{f: bool(value[f]) for f in _FLAGS if f in value} | flags)


def _read_added_tokens(file: Path, special: Collection[str]) -> list[tokenizers.AddedToken]:
    """Reads the tokens of an older folder's list of ids, in their order."""
    ids = _read_json(file)
    if not all(type(token_id) is int for token_id in ids.values()):
        raise InvalidFormatError(f"{file}: expected ids by token, found {safe_repr(ids)}")
    return [_added_token({"content": text}, special=text in special) for text in sorted(ids, key=ids.__getitem__)]


def _model_eos_ids(folder: Path) -> tuple[int, ...]:
    """Reads the ids that end a generation from the first of the model's files that has any."""
    for name in (GENERATION, "config.json"):
        fields = _read_json(folder / name)
        text = fields.get("text_config")  # of a multimodal model, whose own field may be null
        own = text if fields.get("eos_token_id") is None and isinstance(text, Mapping) else fields
        found = own.get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise InvalidFormatError(f"{folder / name}: eos_token_id must be an id or a list of ids, found {found!r}")
        return tuple(ids)
    return ()


def _recommended(found: Mapping[str, Any], names: Mapping[str, str], where: Path) -> dict[str, float]:
    """Picks the settings of `Sampling` from a file's values, given their names there; warns of invalid ones."""
    settings: dict[str, float] = {}
    for name, own in names.items():
        value: Any = found.get(own)
        if name == "top_k" and isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0:
            value = max(0, int(value))  # other programs write 20.0, or -1 for all tokens
        given: dict[str, Any] = {} if value is None else {name: value}
        try:
            Sampling(**given)
            settings |= given
        except InvalidParameterError as problem:
            _log.warning("%s recommends no sampling by %s: %s", where, own, problem)
    return settings


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collects templates by name; template files override `tokenizer_config.json`."""
    source, of_processor = folder / "tokenizer_config.json", folder / "chat_template.json"
    stated = config.get("chat_template")
    if stated is None:  # older versions of transformers write one beside images
        source, stated = of_processor, _read_json(of_processor).get("chat_template")
    if stated is None:
        templates = {}
    elif isinstance(stated, str):
        templates = {"default": stated}
    elif isinstance(stated, Mapping) and all(isinstance(template, str) for template in stated.values()):
        templates = dict(stated)
    else:
        try:
            templates = {str(entry["name"]): str(entry["template"]) for entry in stated}
        except (KeyError, TypeError) as error:
            raise InvalidFormatError(
                f"{source}: chat_template must be a string, a mapping of names to strings, or a list of named ones"
            ) from error
    files = {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    templates |= {name: read_text(file) for name, file in files.items()}
    with contextlib.suppress(NotFoundError):
        templates["default"] = read_text(folder / "chat_template.jinja")
    return templates
