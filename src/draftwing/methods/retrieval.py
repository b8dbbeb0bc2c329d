"""Retrieval: draft what followed the same tokens in other texts. Three methods, which differ in the texts:

    LLMA            (Yang et al. 2304.04487) reference texts that come with a request: retrieved documents, the old
                    version of a file
    REST            (He et al. 2311.08252) a datastore of texts (``draftwing datastore build``): a project's files,
                    former answers, a manual
    SuffixDecoding  (Oliaro et al. 2411.04975) former requests, whose answers agents and pipelines repeat

All three find the longest suffixes of the sequence in an index of their texts, grow the tree of the likeliest
continuations by counts (``suffix_array.grow_tree``), and propose the best tree. Differences to the papers: LLMA and
SuffixDecoding also match the request's own tokens; LLMA proposes trees by counts, not one span; REST matches exactly
and takes probabilities from counts.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from draftwing.errors import ConfigError, DataError, DraftwingWarning, shown
from draftwing.methods.base import Budget, ListTree, swap_remove
from draftwing.methods.lookup import ListDrafter
from draftwing.methods.method import DraftMethod, NewDrafter, Source, integer_option, number_option
from draftwing.methods.suffix_array import (
    Follower,
    Match,
    SuffixArray,
    check_tokenizer,
    grow_tree,
    join_texts,
    read_datastore,
    read_store,
    write_store,
)
from draftwing.models.context import Context, Row
from draftwing.storage import expand_user

MAX_MATCH = 32  # tokens; a longer match predicts no better


class RetrievalDrafter(ListDrafter):
    """Proposes for each row the best of its matches' trees; a subclass finds the matches."""

    def matches(self, index: int, row: Row) -> Iterable[Match]:
        """Yield the places at which the row's last tokens occur in a text and are continued."""
        raise NotImplementedError

    def max_nodes(self, match: Match) -> float:
        """Return the maximum number of nodes to draft from a match."""
        return math.inf

    def list_trees(self, ctx: Context, budget: Budget) -> list[ListTree]:
        """Return for each row the tree with the most nodes expected to be accepted; see ``ListDrafter``."""
        width, max_nodes = self.max_paths(budget)
        best = []
        for index, row in enumerate(ctx.rows):
            root, matches = row.tokens[-1], self.matches(index, row) if budget.depth else ()
            trees = (
                grow_tree(root, match, int(min(max_nodes, self.max_nodes(match))), budget.depth, width)
                for match in matches
            )
            best.append(max(trees, key=lambda tree: tree.score, default=ListTree([root])))
        return best


# --- LLMA ------------------------------------------------------------------------------------------------------------


class LlmaDrafter(RetrievalDrafter):
    """Copies from reference texts, and from the request's own tokens: the prompt often contains the references.

    ``references`` are for every request; a row may have further ones (``Row.references``).
    """

    name = "llma"

    def __init__(self, vocab_size: int, references: Sequence[Sequence[int]] = (), min_match: int = 2) -> None:
        super().__init__(vocab_size)
        self._shared, self._min_match = self._index(references), min_match
        self._references: list[SuffixArray | None] = []

    def _index(self, references: Sequence[Sequence[int]]) -> SuffixArray | None:
        return SuffixArray(join_texts(references), vocab_size=self._vocab_size) if len(references) else None

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        super().admit(ctx, features)
        self._references.append(self._index(ctx.rows[-1].references))

    def remove(self, ctx: Context, row: int) -> None:
        super().remove(ctx, row)
        swap_remove(self._references, row)

    def matches(self, index: int, row: Row) -> Iterator[Match]:
        """Yield the longest match in the row's references, the shared ones, and the request itself."""
        ending = row.tokens[-MAX_MATCH:]
        for texts in (self._references[index], self._shared):
            match = None if texts is None else texts.match(ending, self._min_match, MAX_MATCH)
            if match is not None:
                yield match
        yield from self.automaton(index, row).matches(self._min_match, 1)


# --- REST ------------------------------------------------------------------------------------------------------------


class RestDrafter(RetrievalDrafter):
    """Finds the longest suffix of the sequence in a datastore, exactly, and proposes what followed it there.

    Drafters of any number of threads may share ``texts``. Suffixes have ``min_match`` to ``max_match`` tokens.
    """

    name = "rest"

    def __init__(
        self, vocab_size: int, texts: SuffixArray, min_match: int = 2, max_match: int = 16, *, identity: str = ""
    ) -> None:
        super().__init__(vocab_size)
        self._texts, self._min_match, self._max_match = texts, min_match, max(min_match, max_match)
        self.identity = identity

    def matches(self, index: int, row: Row) -> Iterable[Match]:
        match = self._texts.match(row.tokens[-self._max_match :], self._min_match, self._max_match)
        return () if match is None else (match,)


# --- SuffixDecoding --------------------------------------------------------------------------------------------------

SAVE_INTERVAL_TOKENS = 1 << 14  # for servers whose requests never pause

Place = tuple[tuple[SuffixArray, Any], ...]  # a place in several arrays at once


class Memory:
    """The texts of former requests: searched and extended by any number of threads, bounded, optionally in a file.

    Texts are added one by one, so they lie in several suffix arrays, each more than twice as large as the next: a new
    array is merged with the previous ones until that holds (a log-structured merge), so that a token is sorted again
    only a few times. When there are too many tokens, the oldest array is dropped. Readers take the current tuple of
    arrays (``parts``, the oldest first) and need no lock, because arrays never change.

    Args:
        max_tokens: tokens to keep, including the ends of texts; about 8 bytes each.
        file: to keep them in, or None. It is read if it exists.
        about: the tokenizer of the ids: ``vocab_size``, ``vocab_hash`` and ``target``.
    """

    def __init__(self, max_tokens: int, file: Path | None = None, about: Mapping[str, Any] | None = None) -> None:
        self._max_tokens, self._file, self._about = max_tokens, file, dict(about or {"vocab_size": 2**31})
        self._lock = threading.Lock()
        self.parts: tuple[SuffixArray, ...] = ()
        self._num_unsaved = 0
        if file is not None and file.exists():
            # Copied: the file may be replaced, and a mapped one would stay on the disk meanwhile.
            stored = read_store(file, whole=True).parts
            self.parts = self._bounded([SuffixArray(np.array(part.tokens), np.array(part.order)) for part in stored])
        self._initial = self.parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def match(self, ending: Sequence[int], min_length: int, max_length: int) -> Match | None:
        """Return the longest suffix of ``ending`` that is continued in any text, and where, in all arrays."""
        parts = self.parts  # another thread may replace them
        best = max((part.longest(ending, min_length, max_length) for part in parts), default=0)
        if not best:
            return None
        place: Place = tuple((part, part.place(ending[-best:])) for part in parts)
        return Match(self, best, place)

    def followers(self, place: Place) -> list[Follower]:
        merged: dict[int, Follower] = {}
        for part, occurrences in place:
            for token, times, after in part.followers(occurrences):
                so_far = merged.get(token, Follower(token, 0, ()))
                merged[token] = Follower(token, so_far.times + times, (*so_far.place, (part, after)))
        return list(merged.values())

    def add(self, tokens: Sequence[int]) -> None:
        """Add a text; if it is longer than half of ``max_tokens``, only its end."""
        tokens = tokens[-(self._max_tokens // 2 - 1) :]
        if len(tokens) < 2:
            return  # nothing follows anything in it
        with self._lock:
            self.parts = self._bounded([*self.parts, SuffixArray(join_texts([tokens]))])
            self._num_unsaved += len(tokens)
        if self._num_unsaved >= SAVE_INTERVAL_TOKENS:
            self.save()

    def _bounded(self, parts: list[SuffixArray]) -> tuple[SuffixArray, ...]:
        while len(parts) > 1:
            size = len(parts[-2]) + len(parts[-1])
            # An array of more than half of the tokens would be dropped at once with nearly everything.
            if len(parts[-2]) > 2 * len(parts[-1]) or size > self._max_tokens // 2:
                break
            last = parts.pop()
            parts[-1] = SuffixArray(np.concatenate([parts[-1].tokens, last.tokens]))
        while sum(map(len, parts)) > self._max_tokens:
            parts.pop(0)
        return tuple(parts)

    def forget(self) -> None:
        """Restore the state that was read from the file, or the empty one."""
        with self._lock:
            self.parts, self._num_unsaved = self._initial, 0

    def save(self) -> None:
        """Write the file, if there is one and something is new. Failing to write is a warning: decoding continues."""
        if self._file is None or not self._num_unsaved:
            return
        with self._lock:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_store(self._file, self.parts, self._about)
            except (OSError, ValueError) as error:  # ValueError: an invalid file name
                message = f"{self._file}: former requests cannot be stored ({error}): check the path and the disk"
                warnings.warn(message, DraftwingWarning, stacklevel=2)
            self._num_unsaved = 0


class SuffixDrafter(RetrievalDrafter):
    """Proposes the best continuation from the request's own tokens or from former requests.

    The longer a match, the more tokens are drafted: ``alpha`` nodes for each of its tokens. A row's output is added to
    ``memory``, which drafters of any number of threads may share, when the row is removed.
    """

    name = "suffix"
    learns = True
    MAX_OWN_MATCHES = 4  # matches of different lengths in the request itself, of which the best is proposed

    def __init__(self, vocab_size: int, memory: Memory, alpha: float = 2.0, min_match: int = 1) -> None:
        super().__init__(vocab_size)
        self._memory, self._alpha, self._min_match = memory, alpha, min_match

    def forget(self) -> None:
        self._memory.forget()

    def remove(self, ctx: Context, row: int) -> None:
        """Remember the output, with the end of the prompt that it answers."""
        super().remove(ctx, row)
        left = ctx.rows[row]
        if len(left.tokens) > left.prompt_length:
            self._memory.add(left.tokens[max(0, left.prompt_length - MAX_MATCH) :])
        if ctx.num_rows == 1:
            self._memory.save()

    def matches(self, index: int, row: Row) -> Iterable[Match]:
        """Yield matches of several lengths, in the request and the memory: shorter ones have more evidence."""
        yield from self.automaton(index, row).matches(self._min_match, self.MAX_OWN_MATCHES)
        ending, length = row.tokens[-MAX_MATCH:], MAX_MATCH
        while length >= self._min_match:
            match = self._memory.match(ending, self._min_match, length)
            if match is None:
                return
            yield match
            length = match.length // 2

    def max_nodes(self, match: Match) -> float:
        return max(1.0, self._alpha * match.length)


# --- registration ----------------------------------------------------------------------------------------------------

_MEMORY_TOKENS = 1_000_000  # kept from earlier requests by default: 8 MB
_MIN_MATCH = {"min_match": integer_option("min_match", 1)}


def _memory_file(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value) or Path(value).is_dir():
        raise ConfigError(f"draft_options: memory must be a file, found {shown(value)}: give its path; it may be new")
    return expand_user(value)


def _references(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(
            f"draft_options: references must be a list of texts (str), files (Path) or token ids, found "
            f"{shown(value)}: put it into a list"
        )
    return list(value)


def _reference_ids(reference: Any, source: Source) -> Sequence[int]:
    """Return the ids of a text (str), of a file (``Path``) or of a list of ids."""
    vocab_size = source.target.vocab_size
    if isinstance(reference, Path):
        try:
            reference = reference.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{reference}: this reference cannot be read ({error}): give a UTF-8 text file") from error
    if isinstance(reference, str):
        if source.tokenizer is None:
            raise ConfigError("draft_options: references are texts, but there is no tokenizer: give them as token ids")
        return source.tokenizer.encode_plain(reference)
    if isinstance(reference, list | tuple) and all(
        isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size for token in reference
    ):
        return reference
    raise ConfigError(
        f"draft_options: a reference is a text (str), a file (Path) or a list of token ids below {vocab_size:,}, "
        f"found {shown(reference)}: correct or drop it"
    )


class Llma(DraftMethod):
    options: ClassVar = {"references": _references, **_MIN_MATCH}

    def new_drafter(self, source: Source) -> NewDrafter:
        options = {**source.options}
        references = [_reference_ids(reference, source) for reference in options.pop("references", [])]
        return partial(LlmaDrafter, source.target.vocab_size, references, **options)


class Suffix(DraftMethod):
    options: ClassVar = {
        "alpha": number_option("alpha", 1000, "give the nodes for each matched token, such as 2.0"),
        "memory": _memory_file,
        "memory_tokens": integer_option("memory_tokens", 1000),
        **_MIN_MATCH,
    }

    def new_drafter(self, source: Source) -> NewDrafter:
        options, target = {**source.options}, source.target
        file, max_tokens = options.pop("memory", None), options.pop("memory_tokens", _MEMORY_TOKENS)
        if file is not None and file.exists():
            fix = "name another file, or delete this one"
            check_tokenizer(file, read_store(file).about, source.tokenizer, target.vocab_size, fix)
        about = {
            "target": target.name,
            "vocab_size": target.vocab_size,
            "vocab_hash": "" if source.tokenizer is None else source.tokenizer.vocab_hash,
        }
        return partial(SuffixDrafter, target.vocab_size, Memory(max_tokens, file, about), **options)


class Rest(DraftMethod):
    options: ClassVar = {"max_match": integer_option("max_match", 1), **_MIN_MATCH}

    def new_drafter(self, source: Source) -> NewDrafter:
        store = read_datastore(source.folder)
        fix = "build a datastore with --target set to this target"
        check_tokenizer(source.folder, store.about, source.tokenizer, source.target.vocab_size, fix)
        identity = str(store.about["identity"])
        return partial(RestDrafter, source.target.vocab_size, store.parts[0], identity=identity, **source.options)
