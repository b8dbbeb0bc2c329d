"""Drafts that are looked up in texts: references, a datastore, former requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftwing.drafters.kind import Kind, NewDrafter, Source
from draftwing.errors import ConfigError, DataError, shown

__all__ = ["RETRIEVAL"]

_MOST_TOKENS = 1_000_000  # of former requests: 8 MB


def _whole(name: str, least: int, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"draft_options: {name} must be at least {least:,}, found {shown(value)}: give a whole number"
        )
    return value


def _alpha(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1000:
        raise ConfigError(
            f"draft_options: alpha must be above 0 and at most 1,000 (nodes for each matched token), found "
            f"{shown(value)}: give a number such as 2.0"
        )
    return float(value)


def _file(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value) or Path(value).is_dir():
        raise ConfigError(f"draft_options: memory must be a file, found {shown(value)}: give its path; it may be new")
    return Path(value).expanduser()


def _references(value: Any) -> list[Any]:
    """Texts, files (as ``Path``) and lists of ids."""
    if not isinstance(value, list | tuple):
        raise ConfigError(
            f"draft_options: references must be a list of texts (str), files (Path) or token ids, found "
            f"{shown(value)}: put it into a list"
        )
    return list(value)


def _make_llma(source: Source) -> NewDrafter:
    from draftwing.drafters.retrieval.llma import LlmaDrafter

    options = {**source.options}
    ids = [_ids_of(each, source) for each in options.pop("references", [])]
    return partial(LlmaDrafter, source.target.vocab_size, ids, **options)


def _ids_of(reference: Any, source: Source) -> Sequence[int]:
    """A reference as ids, without special tokens."""
    vocab_size = source.target.vocab_size
    if isinstance(reference, Path):
        try:
            reference = reference.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{reference}: this reference cannot be read ({error}): give a UTF-8 text file") from error
    if isinstance(reference, str):
        if source.tokenizer is None:
            raise ConfigError("draft_options: references are texts, and no tokenizer is known: give them as token ids")
        return source.tokenizer.encode_plain(reference)
    if isinstance(reference, list | tuple) and all(
        isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size for token in reference
    ):
        return reference
    raise ConfigError(
        f"draft_options: a reference is a text (str), a file (Path) or a list of token ids below {vocab_size:,}, "
        f"found {shown(reference)}: correct or drop it"
    )


def _make_rest(source: Source) -> NewDrafter:
    from draftwing.drafters.retrieval.datastore import read_datastore
    from draftwing.drafters.retrieval.rest import RestDrafter
    from draftwing.drafters.retrieval.store import check_tokenizer

    store = read_datastore(source.folder)
    fix = "build a datastore with --target set to this target"
    check_tokenizer(source.folder, store.about, source.tokenizer, source.target.vocab_size, fix)
    identity = str(store.about["identity"])
    return partial(RestDrafter, source.target.vocab_size, store.parts[0], identity=identity, **source.options)


def _is_rest(config: Mapping[str, Any], folder: Path) -> bool:
    from draftwing.drafters.retrieval.datastore import is_datastore

    return is_datastore(config)


def _make_suffix(source: Source) -> NewDrafter:
    from draftwing.drafters.retrieval.memory import Memory
    from draftwing.drafters.retrieval.store import check_tokenizer, read_store
    from draftwing.drafters.retrieval.suffixes import SuffixDrafter

    options, target = {**source.options}, source.target
    file, most = options.pop("memory", None), options.pop("memory_tokens", _MOST_TOKENS)
    if file is not None and file.exists():
        fix = "name another file, or delete this one"
        check_tokenizer(file, read_store(file).about, source.tokenizer, target.vocab_size, fix)
    about = {
        "target": target.name,
        "vocab_size": target.vocab_size,
        "vocab_hash": "" if source.tokenizer is None else source.tokenizer.vocab_hash,
    }
    return partial(SuffixDrafter, target.vocab_size, Memory(most, file, about), **options)


_MIN_MATCH = {"min_match": partial(_whole, "min_match", 1)}

RETRIEVAL = (
    Kind(
        "llma",
        "what follows in reference texts",
        _make_llma,
        options={"references": _references, **_MIN_MATCH},
    ),
    Kind(
        "suffix",
        "what followed in this and former requests",
        _make_suffix,
        options={
            "alpha": _alpha,
            "memory": _file,
            "memory_tokens": partial(_whole, "memory_tokens", 1000),
            **_MIN_MATCH,
        },
    ),
    Kind(
        "rest",
        "a datastore of draftwing datastore build (REST)",
        _make_rest,
        _is_rest,
        options={"max_match": partial(_whole, "max_match", 1), **_MIN_MATCH},
    ),
)
