"""Sources of training data: which files there are, and the documents and dialogues in them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Encoding, processors
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor

from draftwing.errors import ConfigError, DataError, TokenizerError, shown
from draftwing.text.prompts import FORMS, Message, is_record, parse_json, read_record
from draftwing.text.tokenizer import Tokenizer

_JSON_LINES = (".jsonl", ".ndjson")
# Installed packages and compiled files are not what a folder is named for.
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
_HEAD_BYTES = 8192  # enough to tell text from anything else before a file of gigabytes is read


@dataclass(frozen=True)
class SourceFile:
    """A file with data.

    Attributes:
        name: for messages: as it was given, or relative to the folder that was.
        in_folder: found in a folder; then it may be skipped where it is no text.
    """

    path: Path
    name: str
    num_bytes: int
    in_folder: bool


@dataclass(frozen=True)
class Record:
    """One document or one dialogue.

    Attributes:
        where: file and line, for messages.
        text: of a document; None for a dialogue.
        messages: of a dialogue.
        num_bytes: its share of the file, for progress.
        ended: False for a document that was cut off (``finish_reason`` is ``length``): no end token closes it.
    """

    where: str
    text: str | None
    messages: tuple[Message, ...]
    num_bytes: int
    ended: bool = True


# --- files -----------------------------------------------------------------------------------------------------------


def find_files(
    sources: Sequence[str | Path], exclude: Path | None = None, *, output: Path | None = None
) -> list[SourceFile]:
    """Every file of the sources, folders in the order of their relative names.

    Hidden files and folders, ``__pycache__``, installed packages and ``output`` are left out of folders.

    Args:
        exclude: a file with one relative name per line to leave out of folders: a name, a folder with a slash at
            its end, or a pattern with ``*`` (which stands for slashes too). Empty lines and ``#`` lines say nothing.
        output: a file that is being written, and therefore no source.

    Raises:
        DataError: there is no source, one is missing, or one is an empty file or a folder without files.
    """
    if not sources:
        raise DataError("there is no source of data: give at least one file or folder")
    patterns = _read_patterns(exclude)
    found: list[SourceFile] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = [file for file in _walk(source, patterns) if not _same(file.path, output)]
            if not inside:
                raise DataError(f"{source}: this folder has no file to read: check the path and what is excluded")
            found += inside
        elif not source.exists():
            raise DataError(f"{source}: there is no such file or folder: check the path")
        elif source.stat().st_size == 0:
            raise DataError(f"{source}: this file is empty: give one with text or dialogues")
        elif _same(source, output):
            raise DataError(f"{source}: this file is both a source and the output: write to another file")
        else:
            found.append(SourceFile(source, str(source), source.stat().st_size, in_folder=False))
    return found


def _same(path: Path, other: Path | None) -> bool:
    return other is not None and path.resolve() == other.resolve()


def _read_patterns(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file}: the names to exclude cannot be read ({error}): give a UTF-8 file with one name per line"
        ) from error
    return [line for raw in lines if (line := raw.strip()) and not line.startswith("#")]


def _walk(folder: Path, patterns: list[str]) -> Iterator[SourceFile]:
    paths = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
        paths += [Path(root, name) for name in files if not name.startswith(".")]
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
        size = path.stat().st_size if path.is_file() else 0
        if size and not any(_matches(name, pattern) for pattern in patterns):
            yield SourceFile(path, name, size, in_folder=True)


def _matches(name: str, pattern: str) -> bool:
    if pattern.endswith("/"):
        pattern += "*"
    return fnmatch(name, pattern) if "*" in pattern else name == pattern


# --- records ---------------------------------------------------------------------------------------------------------


def read_records(file: SourceFile) -> Iterator[Record]:
    """The documents and dialogues of a file.

    ``.jsonl`` has one object per line, ``.json`` a list of them; anything else is one document. Of the files of a
    folder, those that are not UTF-8 text are skipped, and a ``.json`` file that is no list of such objects is a
    document like any other.

    Raises:
        DataError: the file cannot be read, or a line or an object means nothing here.
    """
    suffix = file.path.suffix.lower()
    if suffix in _JSON_LINES:
        yield from _read_lines(file)
        return
    text = _read_text(file)
    if text is None:
        return
    if suffix == ".json":
        objects = _list_of_objects(file, text)
        if objects is not None:
            for number, entry in enumerate(objects, 1):
                yield _record(entry, f"{file.name}, entry {number}", file.num_bytes // len(objects))
            return
    yield Record(file.name, text, (), file.num_bytes)


def _read_text(file: SourceFile) -> str | None:
    """The text with plain newlines; None for a file of a folder that has none."""
    try:
        with file.path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
            if b"\0" in head:  # valid UTF-8, but in no text
                raise ValueError("it has zero bytes")
            text = (head + stream.read()).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{file.name}: this file cannot be read ({error}): check its permissions") from error
    except ValueError as error:
        if file.in_folder:
            return None
        raise DataError(
            f"{file.name}: expected UTF-8 text, found other bytes ({error}): convert it to UTF-8"
        ) from error
    return text.replace("\r\n", "\n")


def _read_lines(file: SourceFile) -> Iterator[Record]:
    with file.path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            where = f"{file.name}, line {number}"
            if not line.strip():
                continue
            try:
                entry = parse_json(line.decode("utf-8-sig"))
            except ValueError as error:
                raise DataError(
                    f"{where}: not JSON ({error}): each line must be one object; fix or delete the line"
                ) from error
            yield _record(entry, where, len(line))


def _list_of_objects(file: SourceFile, text: str) -> list[Any] | None:
    """What a ``.json`` file lists; None for a file of a folder that means something else (settings, say)."""
    try:
        found = parse_json(text)
    except ValueError as error:
        if file.in_folder:
            return None
        raise DataError(
            f"{file.name}: not JSON ({error}): expected a list of objects; name the file .jsonl if it has one per line"
        ) from error
    listed = isinstance(found, list) and bool(found) and isinstance(found[0], dict)
    if listed and (not file.in_folder or is_record(found[0])):
        return list(found)
    if file.in_folder:
        return None
    raise DataError(
        f"{file.name}: expected a list of objects with {FORMS}, found {shown(found)}: give such a list, "
        f"or a .jsonl file"
    )


def _record(entry: object, where: str, num_bytes: int) -> Record:
    found = read_record(entry, where, DataError)
    if found.text is not None:
        return Record(where, _encodable(found.text), (), num_bytes, found.ended)
    messages = ({key: _encodable(value) for key, value in message.items()} for message in found.messages)
    return Record(where, None, tuple(messages), num_bytes)


def _encodable(text: str) -> str:
    """Half of a surrogate pair ("\\ud83d" alone) is legal in JSON, but no text: one among millions is replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


# Dialogues as token ids, and which of them the assistant wrote.
#
# A chat template is a program, so where an assistant's turn stands in its output is found by running it: the dialogue
# up to before the turn, ready for the assistant, and the dialogue up to and including the turn must both be beginnings
# of the whole text, and what lies between them is the turn.


Span = tuple[int, int]  # characters from .. to

_JOIN = "\n\n"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Llama 3's templates print today's date otherwise, and a run resumed tomorrow would read other ids.
_FIXED = {"date_string": "26 Jul 2024"}


def bare_tokenizer(tokenizer: Tokenizer) -> FastTokenizer:
    """A copy that neither adds, cuts nor pads, and whose offsets cover all of the text.

    Post-processors of GPT-2's kind trim spaces off the offsets, and a token of spaces alone would lie nowhere.
    """
    bare = FastTokenizer.from_str(tokenizer.fast.to_str())
    bare.post_processor = processors.TemplateProcessing(single="$A")
    bare.no_truncation()
    bare.no_padding()
    return bare


def special_prefix(tokenizer: Tokenizer, bare: FastTokenizer) -> tuple[int, ...]:
    """The ids that ``encode`` puts in front of every text: BOS, or nothing."""
    text = "a"
    inner, whole = bare.encode(text).ids, tokenizer.fast.encode(text).ids
    at = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), 0)
    return tuple(whole[:at])


class DialogueEncoder:
    """Encodes dialogues and marks the assistant's tokens.

    With a chat template, turns are found by prefixes (see above). Where those do not hold, as with templates that
    strip the thinking of earlier turns, the template's own ``{% generation %}`` marks are used; without such marks
    the last turn alone counts. Without a chat template the messages are joined by empty lines, no roles named.

    Args:
        settings: what the template is told beside the dialogue.

    Attributes:
        skipped: why dialogues were left out, and how many.
        refusal: what the chat template said of the first dialogue that it refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        bare: FastTokenizer,
        prefix: tuple[int, ...],
        max_length: int,
        settings: Mapping[str, Any] = _FIXED,
    ) -> None:
        self._tokenizer, self._bare, self._prefix, self._max_length = tokenizer, bare, prefix, max_length
        self._settings = dict(settings)
        self.skipped: Counter[str] = Counter()
        self.refusal = ""

    def encode(self, dialogues: Iterable[Record]) -> list[tuple[np.ndarray, np.ndarray, str]]:
        """Of each dialogue with something to learn, cut at ``max_length``, what makes an ``Example``."""
        texts, spans, places = [], [], []
        for dialogue in dialogues:
            found = self._locate(dialogue.messages)
            if found is not None:
                texts.append(found[0])
                spans.append(found[1])
                places.append(dialogue.where)
        encoded = []
        encodings = self._bare.encode_batch(texts, add_special_tokens=False)
        for encoding, span, where in zip(encodings, spans, places, strict=True):
            ids, mask = self._mark(encoding, span)
            if mask.any():
                encoded.append((ids, mask, where))
            else:
                self.skipped["no room for an answer"] += 1
        return encoded

    def mask_of_prompt(self, messages: Sequence[Message], ids: Sequence[int]) -> np.ndarray:
        """(T,) bool: which of ``ids``, a dialogue put to the model for its next answer, are earlier answers.

        None are where the template does not tell, or makes other ids of the messages.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
        if self._tokenizer.has_chat_template:
            try:
                found = self._by_prefix(messages, turns, ready=True) or self._by_marks(messages, ready=True)
            except Exception:  # jinja errors, and whatever the template itself raises
                found = None
        else:
            text, spans = _joined(messages)
            found = text + _JOIN, spans
        if found is not None:
            encoding = self._bare.encode(found[0], add_special_tokens=False)
            same, mask = self._mark(encoding, found[1])
            if np.array_equal(same, ids):
                return mask
        return np.zeros(len(ids), dtype=bool)

    def check(self) -> None:
        """Raise TokenizerError where the chat template was in the way."""
        if self.refusal:
            raise TokenizerError(
                f"{self._tokenizer.folder}: the chat template refuses the dialogues ({self.refusal}): see that their "
                f"roles are the ones it knows, and take turns"
            )
        if self.skipped["unclear turns"]:
            raise TokenizerError(
                f"{self._tokenizer.folder}: the chat template does not say which tokens are the assistant's: what it "
                f"renders up to a turn is no beginning of what it renders in all, and it has no {{% generation %}} "
                f"marks: put these marks around the assistant's text in the template"
            )

    # --- where the turns are ---------------------------------------------------------------------------------------

    def _locate(self, messages: Sequence[Message]) -> tuple[str, list[Span]] | None:
        """The whole text and the assistant's turns in it; None where the dialogue must be left out."""
        # What the assistant opens a dialogue with answers nothing, and no template renders "nothing yet".
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
        if not turns:
            self.skipped["no assistant turn"] += 1
            return None
        messages = messages[: turns[-1] + 1]  # nothing is learnt from what follows
        if not self._tokenizer.has_chat_template:
            return _joined(messages)
        try:
            found = self._by_prefix(messages, turns) or self._by_marks(messages) or self._last(messages)
        except Exception as error:  # jinja errors, and whatever the template itself raises
            self.skipped["refused by the chat template"] += 1
            self.refusal = self.refusal or str(error)
            return None
        if found is None:
            self.skipped["unclear turns"] += 1
        return found

    def _by_prefix(
        self, messages: Sequence[Message], turns: Sequence[int], *, ready: bool = False
    ) -> tuple[str, list[Span]] | None:
        whole = self._render(messages, ready=ready)
        spans = []
        for turn in turns:
            before = self._render(messages[:turn], ready=True)
            after = whole if turn == len(messages) - 1 else self._render(messages[: turn + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                return None
            spans.append((len(before), _end(messages[turn], whole, len(before), len(after))))
        return whole, spans

    def _by_marks(self, messages: Sequence[Message], *, ready: bool = False) -> tuple[str, list[Span]] | None:
        template = self._chat.get_chat_template()
        if not _GENERATION.search(template):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[list(messages)],
            chat_template=template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=ready,
            **{**self._chat.special_tokens_map, **self._settings},
        )
        (text,), (spans,) = rendered
        return (text, spans) if spans else None

    def _last(self, messages: Sequence[Message]) -> tuple[str, list[Span]] | None:
        return self._by_prefix(messages, [len(messages) - 1])

    def _render(self, messages: Sequence[Message], *, ready: bool = False) -> str:
        rendered = self._chat.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=ready, **self._settings
        )
        return str(rendered)

    @cached_property
    def _chat(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._tokenizer.folder)

    # --- which tokens they are -------------------------------------------------------------------------------------

    def _mark(self, encoding: Encoding, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask: a token counts where all of its characters lie in one span."""
        ids = np.asarray(encoding.ids, dtype=np.int32)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            inside = (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 0] < offsets[:, 1])
            mask |= self._until_end_of_turn(ids, inside)
        if not self._tokenizer.has_chat_template and self._prefix:  # a template writes BOS itself
            ids = np.concatenate([np.asarray(self._prefix, dtype=np.int32), ids])
            mask = np.concatenate([np.zeros(len(self._prefix), dtype=bool), mask])
        mask[:1] = False
        return ids[: self._max_length].copy(), mask[: self._max_length].copy()

    def _until_end_of_turn(self, ids: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """``inside`` without the white space that templates write after the end-of-turn token: the model never does."""
        places = np.flatnonzero(inside)
        last = len(places) - 1
        while last > 0 and not self._bare.decode([int(ids[places[last]])], skip_special_tokens=False).strip():
            last -= 1
        if last >= 0 and int(ids[places[last]]) in self._special:
            inside = inside.copy()
            inside[places[last + 1 :]] = False
        return inside

    @cached_property
    def _special(self) -> set[int]:
        return {token for token, added in self._bare.get_added_tokens_decoder().items() if added.special}


def _end(message: Message, whole: str, start: int, end: int) -> int:
    """Where a turn ends: an answer that was cut off has no end-of-turn token, whatever the template writes there."""
    if message.get("finish_reason") != "length":
        return end
    content = message["content"].strip()
    at = whole.rfind(content, start, end)
    return end if at < 0 else at + len(content)


def _joined(messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """Messages with an empty line between two, and the assistant's."""
    contents = [message["content"] for message in messages]
    starts = accumulate((len(content) + len(_JOIN) for content in contents), initial=0)
    places = zip(starts, messages, strict=False)
    answers = [place for place in places if place[0] and place[1]["role"] == "assistant"]
    return _JOIN.join(contents), [(start, start + len(message["content"])) for start, message in answers]


# What a run trains on: dialogues and documents as token ids, and a part of them held out.


# Tokens of a document that are held out together, so that a corpus of one long file can be split too.
_SECTION = 2**14


@dataclass(frozen=True, eq=False)
class Example:
    """One dialogue.

    Attributes:
        ids: (T,) int32.
        mask: (T,) bool: True where the *prediction of* this token counts in the loss; never at 0.
        where: file and line that it was read from; empty where nobody knows.
    """

    ids: np.ndarray
    mask: np.ndarray
    where: str = ""


@dataclass(frozen=True, eq=False)
class Corpus:
    """What a run trains on.

    Attributes:
        examples: dialogues.
        stream: (N,) int32: the documents one after the other, each closed by the end token. All of it counts.
        starts: (D,) int64: where each document begins in the stream.
        prefix: the ids in front of every window cut from the stream: BOS, or nothing.
        skipped: why records were left out, and how many.
    """

    examples: Sequence[Example] = ()
    stream: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    starts: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    prefix: tuple[int, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of the dialogues and of the stream."""
        return sum(len(example.ids) for example in self.examples) + len(self.stream)


def split(corpus: Corpus, validation_share: float, seed: int = 0) -> tuple[Corpus, Corpus]:
    """A training and a validation corpus, chosen by a hash of the content.

    Duplicates therefore stay on one side, and the order of the sources does not matter. Units are dialogues, and
    sections of up to 16,384 tokens of documents. Small corpora keep at least one unit on each side.

    Raises:
        ConfigError: a share outside [0, 1).
        DataError: there is but one unit.
    """
    sections = _sections(corpus)
    units = [example.ids for example in corpus.examples] + [corpus.stream[start:end] for start, end in sections]
    held = held_out(units, validation_share, seed)
    if not held.any():
        return corpus, Corpus(prefix=corpus.prefix)
    num = len(corpus.examples)
    return (
        _part(corpus, ~held[:num], [s for s, out in zip(sections, held[num:], strict=True) if not out]),
        _part(corpus, held[:num], [s for s, out in zip(sections, held[num:], strict=True) if out]),
    )


def held_out(units: Sequence[np.ndarray], share: float, seed: int = 0) -> np.ndarray:
    """(U,) bool: which units (ids each) a split holds out. At least one on each side, unless the share is 0.

    Raises:
        ConfigError: a share outside [0, 1).
        DataError: no two units are different.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"validation_share must be in [0, 1), found {share}")
    if share == 0:
        return np.zeros(len(units), dtype=bool)
    hashes = np.asarray([_hash(ids, seed) for ids in units])
    if len(np.unique(hashes)) < 2:
        raise DataError(
            f"all there is are {len(units)} dialogues or sections of text, no two of them different: give more data, "
            f"or hold out nothing (validation_share 0)"
        )
    found: np.ndarray = ((hashes < share) | (hashes == hashes.min())) & (hashes != hashes.max())
    return found


def _sections(corpus: Corpus) -> list[tuple[int, int]]:
    """Where each section lies in the stream; none reaches over a document's end."""
    bounds = [*corpus.starts.tolist(), len(corpus.stream)]
    documents = itertools.pairwise(bounds)
    return [(at, min(at + _SECTION, end)) for start, end in documents for at in range(start, end, _SECTION)]


def _hash(ids: np.ndarray, seed: int) -> float:
    """Even in [0, 1)."""
    digest = hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=8, salt=seed.to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little") / 2**64


def _part(corpus: Corpus, chosen: np.ndarray, sections: Sequence[tuple[int, int]]) -> Corpus:
    lengths = [end - start for start, end in sections]
    parts = [corpus.stream[start:end] for start, end in sections]
    return Corpus(
        tuple(example for example, take in zip(corpus.examples, chosen, strict=True) if take),
        np.concatenate(parts) if parts else Corpus().stream,
        np.cumsum([0, *lengths[:-1]], dtype=np.int64) if lengths else Corpus().starts,
        corpus.prefix,
    )


# Batches as a function of (seed, number) alone, so that a resumed run reads what an unbroken one would.


# Rows of one batch differ by at most this factor in length (but for those carried up), which bounds the padding.
_GROWTH = 1.15


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows that are trained on together.

    Attributes:
        ids: (B, T) int64, 0 behind the end of a row.
        mask: (B, T) bool, see ``Example``; False behind the end of a row.
        lengths: (B,) int64.
    """

    ids: Tensor
    mask: Tensor
    lengths: Tensor

    @property
    def real(self) -> Tensor:
        """(B, T) bool: False behind the end of a row."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]

    def to(self, device: torch.device) -> Batch:
        """On a device."""
        return Batch(self.ids.to(device), self.mask.to(device), self.lengths.to(device))

    def runnable(self) -> Batch:
        """With at least one row and 3 tokens, where an unroll has its first entry; what is added does not count.

        A process must take part in every update, even where it has no rows of a batch, or only tiny ones.
        """
        rows, tokens = max(1 - len(self.ids), 0), max(3 - self.ids.shape[1], 0)
        if not rows and not tokens:
            return self
        padding = (0, tokens, 0, rows)
        return Batch(F.pad(self.ids, padding), F.pad(self.mask, padding), F.pad(self.lengths, (0, rows)))


def collate(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Ids and masks (T,) of rows as one padded batch; (0, 1) of no rows."""
    longest = max((len(ids) for ids, _ in rows), default=1)
    padded = torch.zeros(len(rows), longest, dtype=torch.int64)
    masks = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, (ids, mask) in enumerate(rows):
        padded[i, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        masks[i, : len(ids)] = torch.from_numpy(mask)
    return Batch(padded, masks, torch.tensor([len(ids) for ids, _ in rows], dtype=torch.int64))


class Plan:
    """Which rows share a batch: others in every epoch, as a function of (seed, epoch) alone.

    Rows of like length share a batch: each of the length classes is shuffled and filled into batches, and what is left
    over rides with the next longer class. The number of batches is therefore the same in every epoch.

    Args:
        lengths: (R,) the tokens of each row.
        tokens_per_batch: at most, padding counted.
        seed: of all shuffling.

    Raises:
        ConfigError: a batch leaves no room for the longest row.
        DataError: there is nothing to train on.
    """

    def __init__(self, lengths: np.ndarray, tokens_per_batch: int, seed: int = 0) -> None:
        if seed < 0:
            raise ConfigError(f"seed must be at least 0, found {seed}")
        if not len(lengths):
            raise DataError("there is nothing to train on: give dialogues with answers within max_length, or documents")
        longest = int(lengths.max())
        if tokens_per_batch < longest:
            raise ConfigError(
                f"tokens_per_batch is {tokens_per_batch}, and the longest row has {longest} tokens: raise it to at "
                f"least {longest}, or lower max_length"
            )
        limits = [longest]
        while limits[-1] > lengths.min():
            limits.append(min(limits[-1] - 1, int(limits[-1] / _GROWTH)))
        self.lengths, self._seed = lengths, seed
        self._limits = np.asarray(limits[::-1])  # the greatest length of each class, ascending
        self._rows_per_batch = [tokens_per_batch // int(limit) for limit in self._limits]
        self._latest = (0, self.epoch(0))

    @property
    def num_tokens_per_epoch(self) -> int:
        """Tokens in the rows of an epoch, padding not counted."""
        return int(self.lengths.sum())

    @property
    def num_batches_per_epoch(self) -> int:
        """Batches until every row was read."""
        return len(self._latest[1])

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """The rows of each batch of an epoch."""
        rng = np.random.default_rng((self._seed, epoch, 0))
        classes = np.searchsorted(self._limits, self.lengths)
        batches: list[np.ndarray] = []
        carried = np.empty(0, dtype=np.int64)
        for number, size in enumerate(self._rows_per_batch):
            # The carried ones go first: rows must not be pushed up into the longest class time and again.
            rows = np.concatenate([carried, rng.permutation(np.flatnonzero(classes == number))])
            num_full = len(rows) // size
            batches += [rows[i * size : (i + 1) * size] for i in range(num_full)]
            carried = rows[num_full * size :]
        if len(carried):
            batches.append(carried)
        return [batches[i] for i in rng.permutation(len(batches))]

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> tuple[int, list[int]]:
        """The epoch and the rows of a batch, counted over all epochs, or of one rank's share of it.

        The rows of all ranks are those of the whole batch. A rank has none where there are fewer rows than ranks:
        that may happen in the one batch of an epoch that the last rows do not fill.

        Raises:
            ConfigError: a number or rank that does not exist, or batches too small for so many ranks.
        """
        if number < 0 or not 0 <= rank < world_size:
            raise ConfigError(
                f"batch {number} for rank {rank} of {world_size} does not exist: expected a number of at least 0 and a "
                f"rank below world_size"
            )
        if world_size > self._rows_per_batch[-1]:
            raise ConfigError(
                f"a batch has room for {self._rows_per_batch[-1]} of the longest rows, and there are {world_size} "
                f"ranks: raise tokens_per_batch to {world_size * int(self._limits[-1])}, or lower max_length"
            )
        epoch, index = divmod(number, self.num_batches_per_epoch)
        if self._latest[0] != epoch:
            self._latest = (epoch, self.epoch(epoch))
        return epoch, self._latest[1][index][rank::world_size].tolist()


class Batches:
    """Cuts a corpus into batches, each epoch in another way: see ``Plan``.

    Rows are the dialogues, and windows of the stream of documents. An epoch takes the stream as a ring and starts
    cutting at another place of it, so that it has every token once, and always the same number of windows.

    Args:
        corpus: or its dialogues alone.
        tokens_per_batch: at most, padding counted.
        max_length: of a window, and of a dialogue: longer ones are cut.
        seed: of all shuffling.

    Attributes:
        plan: which rows share a batch.

    Raises:
        ConfigError: ``max_length`` leaves no room for a prediction, or a batch none for the longest row.
        DataError: there is nothing to train on.
    """

    def __init__(
        self, corpus: Corpus | Sequence[Example], tokens_per_batch: int, max_length: int, seed: int = 0
    ) -> None:
        corpus = corpus if isinstance(corpus, Corpus) else Corpus(tuple(corpus))
        self._stream, self._prefix = corpus.stream, np.asarray(corpus.prefix, dtype=np.int32)
        self._window = max_length - len(self._prefix)
        if max_length < 2 or self._window < 1:
            raise ConfigError(f"max_length must be at least {max(2, len(self._prefix) + 1)}, found {max_length}")
        self.max_length, self.seed = max_length, seed
        self._examples = [example for example in corpus.examples if example.mask[:max_length].any()]
        full, rest = divmod(len(self._stream), self._window)
        windows = [self._window] * full + [rest] * (rest > 0)
        lengths = np.asarray(
            [min(len(example.ids), max_length) for example in self._examples]
            + [len(self._prefix) + length for length in windows],
            dtype=np.int64,
        )
        self.plan = Plan(lengths, tokens_per_batch, seed)

    @property
    def num_tokens_per_epoch(self) -> int:
        """Tokens in the rows of an epoch, padding not counted."""
        return self.plan.num_tokens_per_epoch

    @property
    def num_batches_per_epoch(self) -> int:
        """Batches until every row was read."""
        return self.plan.num_batches_per_epoch

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The batch of this number, counted over all epochs, or one rank's rows of it (maybe none): see ``Plan.batch``.

        Raises:
            ConfigError: a number or rank that does not exist, or batches too small for so many ranks.
        """
        epoch, rows = self.plan.batch(number, rank, world_size)
        start = self._start(epoch)
        return collate([self._row(row, start) for row in rows])

    def _start(self, epoch: int) -> int:
        """Where the epoch starts to cut the stream."""
        return int(np.random.default_rng((self.seed, epoch, 1)).integers(max(1, len(self._stream))))

    def _row(self, row: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        if row < len(self._examples):
            example = self._examples[row]
            return example.ids[: self.max_length], example.mask[: self.max_length]
        at = (row - len(self._examples)) * self._window
        places = np.arange(at, min(at + self._window, len(self._stream))) + start
        ids = np.concatenate([self._prefix, self._stream.take(places, mode="wrap")])
        mask = np.ones(len(ids), dtype=bool)
        mask[: max(1, len(self._prefix))] = False
        return ids, mask


# A draft vocabulary: the few thousand tokens that a draft head may propose (EAGLE-3, 2503.01840).


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Which of the target's tokens a draft head knows.

    Attributes:
        target_ids: (Vd,) int64, ascending: the target's id of each draft id.
        coverage: share of the corpus's loss tokens that are among them; no draft can be right elsewhere.
        vocab_size: V of the target.
    """

    target_ids: Tensor
    coverage: float
    vocab_size: int

    @classmethod
    def build(
        cls,
        corpus: Corpus | Sequence[Example],
        vocab_size: int,
        draft_vocab_size: int,
        always: Iterable[int] = (),
    ) -> DraftVocabulary:
        """The most frequent loss tokens of a corpus; of equally frequent ones the lower ids.

        Args:
            corpus: or its dialogues alone.
            vocab_size: V of the target's logits.
            draft_vocab_size: Vd; at V or above, the vocabulary is the whole one.
            always: ids that are in it whatever their frequency: end tokens and other special ones.

        Raises:
            ConfigError: Vd is too small, or ``always`` names ids outside the vocabulary.
            DataError: the corpus has no loss tokens, or ids outside the vocabulary.
        """
        kept = np.unique(np.fromiter(always, dtype=np.int64))
        if draft_vocab_size < max(1, len(kept)):
            raise ConfigError(
                f"draft_vocab_size must be at least {max(1, len(kept))} ({len(kept)} ids are always in), found "
                f"{draft_vocab_size}"
            )
        if len(kept) and not (kept[0] >= 0 and kept[-1] < vocab_size):
            raise ConfigError(
                f"always names ids outside the vocabulary of {vocab_size}: {kept.tolist()}; leave them out"
            )
        counts = _count(corpus, vocab_size)
        wanted = counts.astype(np.float64)
        wanted[kept] = np.inf
        best = np.argsort(-wanted, kind="stable")[:draft_vocab_size]
        chosen = np.sort(best)
        coverage = float(counts[chosen].sum() / counts.sum())
        return cls(torch.from_numpy(chosen.astype(np.int64)), coverage, vocab_size)

    @property
    def d2t(self) -> Tensor:
        """(Vd,) int64: the target's id minus the draft id, as EAGLE-3 checkpoints store it."""
        return self.target_ids - torch.arange(len(self.target_ids), device=self.target_ids.device)

    @property
    def t2d(self) -> Tensor:
        """(V,) bool: whether the target's id is in the draft vocabulary."""
        return torch.zeros(self.vocab_size, dtype=torch.bool).index_fill_(0, self.target_ids, True)


def coverage_of(corpus: Corpus | Sequence[Example], target_ids: Tensor | None, vocab_size: int) -> float:
    """Share of a corpus's loss tokens in a draft vocabulary (None: the whole one)."""
    counts = _count(corpus, vocab_size)
    return 1.0 if target_ids is None else float(counts[target_ids.cpu().numpy()].sum() / counts.sum())


def _count(corpus: Corpus | Sequence[Example], vocab_size: int) -> np.ndarray:
    """(V,) how often each token is predicted."""
    corpus = corpus if isinstance(corpus, Corpus) else Corpus(tuple(corpus))
    counts = np.bincount(corpus.stream, minlength=vocab_size)
    loss_tokens = [example.ids[example.mask] for example in corpus.examples]
    if loss_tokens:
        found = np.bincount(np.concatenate(loss_tokens), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    if len(counts) > vocab_size:
        raise DataError(
            f"the data has token id {len(counts) - 1}, and the vocabulary has {vocab_size}: encode the data with the "
            f"target's own tokenizer"
        )
    if not counts.sum():
        raise DataError("the data has no token that counts in the loss: give documents, or dialogues with answers")
    return counts


# Files and folders to what a run trains on: dialogues and documents as token ids.
#
# Dialogues stay as they are, one row each, and only what the assistant wrote counts. Plain documents are one long
# stream that every epoch cuts at another place, so that no token is always the first of its window.


# Characters encoded at once: enough for every core, and little beside what the ids of a corpus take.
_CHUNK = 2**21
# Longer documents are encoded in pieces cut at line ends, as one text is encoded on one core.
_PIECE = 2**18


def read_examples(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    eos_id: int | None = None,
    exclude: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Read and encode files and folders: see ``find_files`` and ``read_records`` for what they may hold.

    Args:
        max_length: tokens of a dialogue; longer ones are cut there.
        eos_id: closes every document; None is the tokenizer's own.
        exclude: names to leave out of folders.
        on_progress: called with the bytes done and the bytes in all.

    Raises:
        DataError: a source cannot be used, or nothing is left to train on.
        TokenizerError: the chat template refuses every dialogue, or does not tell what the assistant wrote; or
            there are documents and no end token is known.
        ConfigError: ``max_length`` below 2.
    """
    if max_length < 2:
        raise ConfigError(f"max_length must be at least 2 (a token, and one to predict), found {max_length}")
    files = find_files(sources, exclude)
    encoder = _Encoder(tokenizer, max_length, eos_id)
    done, total, shown = 0, sum(file.num_bytes for file in files), 0
    for file in files:
        for record in read_records(file):
            encoder.add(record)
            done += record.num_bytes
            if on_progress is not None and done - shown >= total // 500:  # there may be millions of records
                shown = done
                on_progress(min(done, total), total)
    corpus = encoder.finish()
    if not corpus.num_tokens:
        encoder.dialogues.check()
        reasons = (
            ", ".join(f"{count} with {why}" for why, count in corpus.skipped.items()) or "there was no text at all"
        )
        raise DataError(
            f"{', '.join(map(str, sources))}: nothing is left to train on ({reasons}): give dialogues with answers "
            f"(`draftwing data regenerate` writes them), documents, or a larger max_length"
        )
    if on_progress is not None:
        on_progress(total, total)
    return corpus


class _Encoder:
    """Collects records, encodes them in chunks, and keeps nothing but ids."""

    def __init__(self, tokenizer: Tokenizer, max_length: int, eos_id: int | None) -> None:
        self._tokenizer, self._eos = tokenizer, eos_id
        self._bare = bare_tokenizer(tokenizer)
        self._prefix = special_prefix(tokenizer, self._bare)
        self.dialogues = DialogueEncoder(tokenizer, self._bare, self._prefix, max_length)
        self._waiting: list[Record] = []
        self._pieces: list[tuple[str, str]] = []  # a piece of a document, and what it is: inner, end or cut
        self._num_characters = 0
        self._examples: list[Example] = []
        self._parts: list[np.ndarray] = []
        self._starts, self._length = [0], 0
        self._skipped: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        """Take a record."""
        if record.text is None:
            self._waiting.append(record)
            self._count(sum(len(message["content"]) for message in record.messages))
        elif not record.text.strip():
            self._skipped["no text"] += 1
        else:
            pieces = list(_cut(record.text))
            for piece in pieces[:-1]:
                self._pieces.append((piece, "inner"))
                self._count(len(piece))
            self._pieces.append((pieces[-1], "end" if record.ended else "cut"))
            self._count(len(pieces[-1]))

    def _count(self, num_characters: int) -> None:
        self._num_characters += num_characters
        if self._num_characters >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        self._examples += [Example(*found) for found in self.dialogues.encode(self._waiting)]
        if self._pieces:
            if self._eos is None:
                self._eos = _find_eos(self._tokenizer)
            encodings = self._bare.encode_batch_fast([piece for piece, _ in self._pieces], add_special_tokens=False)
            for encoding, (_, kind) in zip(encodings, self._pieces, strict=True):
                ids = np.asarray([*encoding.ids, self._eos] if kind == "end" else encoding.ids, dtype=np.int32)
                self._parts.append(ids)
                self._length += len(ids)
                if kind != "inner":
                    self._starts.append(self._length)
        self._waiting, self._pieces, self._num_characters = [], [], 0

    def finish(self) -> Corpus:
        """All that was added."""
        self._flush()
        return Corpus(
            tuple(self._examples),
            np.concatenate(self._parts) if self._parts else Corpus().stream,
            np.asarray(self._starts[:-1], dtype=np.int64),
            self._prefix,
            dict(self._skipped + self.dialogues.skipped),
        )


def _cut(text: str) -> Iterator[str]:
    """Pieces of a long text, cut after a line's end where there is one."""
    start = 0
    while len(text) - start > _PIECE:
        end = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def _find_eos(tokenizer: Tokenizer) -> int:
    """The end token of tokenizer_config.json, else the first one of generation_config.json or config.json."""
    token = _read_json(tokenizer.folder / "tokenizer_config.json").get("eos_token")
    found: Any = tokenizer.fast.token_to_id(str(token.get("content") if isinstance(token, dict) else token))
    for name in ("generation_config.json", "config.json"):
        if found is None:
            found = _read_json(tokenizer.folder / name).get("eos_token_id")
            found = next(iter(found), None) if isinstance(found, list) else found
    if not isinstance(found, int):
        raise TokenizerError(
            f"{tokenizer.folder}: no end token is known to close documents with: expected eos_token in "
            f"tokenizer_config.json or eos_token_id in generation_config.json; add one, or pass eos_id"
        )
    return found


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file}: not readable as JSON ({error}): download it again") from error
    return found if isinstance(found, dict) else {}
