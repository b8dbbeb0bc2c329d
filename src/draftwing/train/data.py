"""Training data: sources, their documents and dialogues as token ids, and batches of them."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Encoding, processors
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor

from draftwing.errors import ConfigError, DataError, DraftwingError, TokenizerError, shown
from draftwing.methods.suffix_array import Ids, join_texts
from draftwing.models.config import text_config
from draftwing.remote import OnProgress, Phase, download, local_copy, public_name
from draftwing.storage import parse_json, similar_paths
from draftwing.text.prompts import FORMS, Message, is_record, read_record
from draftwing.text.tokenizer import Tokenizer

T = TypeVar("T")

HUB_DATA_SET = re.compile(r"hf://datasets/([^/@?]+(?:/[^/@?]+)?)(?:@([^?]+))?/?(?:\?(.*))?")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PARQUET = ".parquet"
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
HEAD_BYTES = 8192  # read first, to reject binary files of gigabytes early
CHUNK_CHARACTERS = 2**21  # encoded in one call: enough for every core, and little memory
PIECE_CHARACTERS = 2**18  # longer documents are encoded in pieces, since one text is encoded on one core
SECTION_TOKENS = 2**14  # tokens of a document that are held out together, so that a corpus of one file can be split
LENGTH_GROWTH = 1.15  # rows of one batch differ at most by this factor in length, which bounds the padding


# --- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceFile:
    path: Path
    name: str  # as the user wrote it, or relative to the folder
    num_bytes: int
    in_folder: bool  # found in a folder, so that it may be skipped if it is not text


@dataclass(frozen=True)
class DataSet:
    """Records that the package ``datasets`` reads one after another: a data set of the Hub, or Parquet files."""

    name: str  # without credentials
    path: str  # id on the Hub, or ``parquet``
    options: Mapping[str, Any]  # arguments of ``load_dataset``

    @classmethod
    def at(cls, source: str | Path) -> DataSet | None:
        """Return the data set at ``hf://datasets/org/name[@revision][?config=...&split=...]``; None for other sources.

        The default split is ``train``. Raises DataError for other parameters.
        """
        match = HUB_DATA_SET.fullmatch(str(source))
        if match is None:
            return None
        path, revision, query = match.groups()
        given = dict(parse_qsl(query or "", keep_blank_values=True))
        if unknown := sorted(given.keys() - {"config", "split"}):
            raise DataError(f"{source}: unknown parameter {shown(unknown[0])}: a data set takes config and split")
        options = {"name": given.get("config"), "split": given.get("split", "train"), "revision": revision}
        return cls(str(source), path, options)

    @classmethod
    def of_files(cls, name: str, files: Sequence[Path]) -> DataSet:
        """Return the records of Parquet files."""
        return cls(name, "parquet", {"split": "train", "data_files": list(map(str, files))})

    def open(self) -> Any:
        """Return the ``datasets.IterableDataset``. Raises ConfigError without the package, DataError if it fails."""
        try:
            import datasets
        except ImportError:
            raise ConfigError(
                f"{self.name}: needs the package datasets: run pip install 'draftwing[train]', or pip install datasets"
            ) from None
        datasets.logging.set_verbosity_error()
        with self.reading():
            return datasets.load_dataset(self.path, streaming=True, **self.options)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn errors of ``datasets`` in the block into a DataError."""
        try:
            yield
        except DraftwingError:
            raise
        except Exception as error:  # raised by the client of the Hub, pyarrow and the builders
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(
                f"{self.name}: cannot be read ({text[:300]}): check its name, ?config= and ?split=, the network and "
                f"your credentials"
            ) from error

    def read(self, records: Iterable[Mapping[str, Any]] | None = None, first: int = 1) -> Iterator[DataRecord]:
        """Yield the records, or those of an iterator that begins with the one of this number."""
        with self.reading():
            for number, entry in enumerate(self.open() if records is None else records, first):
                # All rows have all columns, with None for those that a row does not use.
                given = {key: value for key, value in entry.items() if value is not None}
                yield _make_record(given, f"{self.name}, record {number}", len(str(given)))


Source = SourceFile | DataSet


def download_sources(sources: Sequence[str | Path], phase: Phase) -> None:
    """Copy the URLs among the sources to this machine (see ``remote``), except for data sets, which are streamed."""
    download((source for source in sources if DataSet.at(source) is None), phase)


def find_files(sources: Sequence[str | Path], *, output: Path | None = None) -> list[Source]:
    """Find every file of the sources, and the data sets; files of a folder are sorted by their relative names.

    ``hf://datasets/org/name`` is a data set, as are the Parquet files of a folder together. Other URLs are copied to
    this machine first (see ``remote``). Folders are read without hidden files and folders, ``__pycache__``, installed
    packages, and ``output``, the file that is being written.
    """
    if not sources:
        raise DataError("there is no source of data: give at least one file or folder (--data)")
    output = output and output.resolve()
    files: list[Source] = []
    for given in sources:
        if data_set := DataSet.at(given):
            files.append(data_set)
            continue
        source, name = local_copy(given), public_name(given)
        if source.is_dir():
            inside = [file for file in _walk(source) if not output or file.path.resolve() != output]
            if not inside:
                raise DataError(f"{name}: this folder has no file to read: check the path")
            tables = [file.path for file in inside if file.path.suffix.lower() == PARQUET]
            files += [file for file in inside if file.path.suffix.lower() != PARQUET]
            files += [DataSet.of_files(name, tables)] if tables else []
        elif not source.exists():
            close = similar_paths(source)
            fix = f"did you mean {' or '.join(close)}?" if close else "check the path"
            if HUB_ID.fullmatch(name) and not close:
                fix += f", or give hf://datasets/{name} for a data set of the Hub"
            raise DataError(f"{name}: there is no such file or folder: {fix}")
        elif source.stat().st_size == 0:
            raise DataError(f"{name}: this file is empty: give one with text or dialogues")
        elif source.resolve() == output:
            raise DataError(f"{name}: this file is both a source and the output: write to another file")
        elif source.suffix.lower() == PARQUET:
            files.append(DataSet.of_files(name, [source]))
        else:
            files.append(SourceFile(source, name, source.stat().st_size, in_folder=False))
    return files


def _walk(folder: Path) -> Iterator[SourceFile]:
    paths = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        paths += [Path(root, name) for name in files if not name.startswith(".")]
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
        size = path.stat().st_size if path.is_file() else 0
        if size:
            yield SourceFile(path, name, size, in_folder=True)


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataRecord:
    """One document or one dialogue."""

    where: str  # file and line, for messages
    text: str | None  # a document; None for a dialogue
    messages: tuple[Message, ...]  # a dialogue
    num_bytes: int  # its share of the file, for progress
    ended: bool = True  # False for a document that was cut off: no end token follows it


def read_files(files: Sequence[Source], on_progress: OnProgress | None) -> Iterator[DataRecord]:
    """Yield the records of all files; ``on_progress`` gets the bytes read and the total, 0 with data sets."""
    sizes, done = [file.num_bytes for file in files if isinstance(file, SourceFile)], 0
    total = sum(sizes) if len(sizes) == len(files) else 0
    step = total // 500 if total else 2**16
    next_report = step
    for record in itertools.chain.from_iterable(map(read_records, files)):
        yield record
        done += record.num_bytes
        if on_progress is not None and done >= next_report:  # there may be millions of records
            next_report = done + step
            on_progress(min(done, total) if total else done, total)
    if on_progress is not None:
        on_progress(total or done, total or done)


def read_records(file: Source) -> Iterator[DataRecord]:
    """Yield the documents and dialogues of a file or a data set.

    ``.jsonl`` and ``.ndjson`` files have one object per line, ``.json`` files a list of them; any other file is one
    document. In folders, files that are not UTF-8 text are skipped, and a ``.json`` file with other contents is a
    document.
    """
    if isinstance(file, DataSet):
        yield from file.read()
        return
    suffix = file.path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        yield from _read_lines(file)
        return
    text = _read_text(file)
    if text is None:
        return
    entries = _list_entries(file, text) if suffix == ".json" else None
    if entries is None:
        yield DataRecord(file.name, text, (), file.num_bytes)
        return
    for number, entry in enumerate(entries, 1):
        yield _make_record(entry, f"{file.name}, entry {number}", file.num_bytes // len(entries))


def _read_text(file: SourceFile) -> str | None:
    """Return the text with ``\\n`` line ends; None for a file of a folder that is not text."""
    try:
        with file.path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
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


def _read_lines(file: SourceFile) -> Iterator[DataRecord]:
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
            yield _make_record(entry, where, len(line))


def _list_entries(file: SourceFile, text: str) -> list[Any] | None:
    """Return the entries of a ``.json`` file; None for a file of a folder with other contents, such as settings."""
    try:
        value = parse_json(text)
    except ValueError as error:
        if file.in_folder:
            return None
        raise DataError(
            f"{file.name}: not JSON ({error}): expected a list of objects; name the file .jsonl if it has one per line"
        ) from error
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, dict) and (is_record(first) or not file.in_folder):
        return list(value)
    if file.in_folder:
        return None
    raise DataError(
        f"{file.name}: expected a list of objects with {FORMS}, found {shown(value)}: give such a list, "
        f"or a .jsonl file"
    )


def _make_record(entry: object, where: str, num_bytes: int) -> DataRecord:
    parsed = read_record(entry, where, DataError)
    text = None if parsed.text is None else _encodable(parsed.text)
    messages = tuple({key: _encodable(value) for key, value in message.items()} for message in parsed.messages)
    return DataRecord(where, text, messages, num_bytes, parsed.ended)


def _encodable(text: str) -> str:
    """Replace unpaired surrogates ("\\ud83d" alone), which JSON allows and UTF-8 does not."""
    return text.encode("utf-8", "replace").decode("utf-8")


# --- dialogues as token ids ------------------------------------------------------------------------------------------


Span = tuple[int, int]  # first character, and the one after the last

JOIN = "\n\n"
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Llama 3's templates print today's date otherwise, and a run resumed tomorrow would read other ids.
FIXED_SETTINGS = {"date_string": "26 Jul 2024"}


@dataclass(frozen=True, eq=False)
class Example:
    """One dialogue."""

    ids: np.ndarray  # (T,) int32
    mask: np.ndarray  # (T,) bool: True if the prediction of this token counts in the loss; never at 0


def bare_tokenizer(tokenizer: Tokenizer) -> FastTokenizer:
    """Return a copy that adds no tokens, neither cuts nor pads, and whose offsets cover the whole text.

    Post-processors like GPT-2's trim spaces off the offsets, so that a token of spaces would have none.
    """
    bare = FastTokenizer.from_str(tokenizer.fast.to_str())
    bare.post_processor = processors.TemplateProcessing(single="$A")
    bare.no_truncation()
    bare.no_padding()
    return bare


class DialogueEncoder:
    """Encodes dialogues and marks the assistant's tokens.

    A chat template is a program, so an assistant's turn is found by running it: the dialogue before the turn, with the
    prompt for the assistant, and the dialogue up to the end of the turn must both be prefixes of the whole text; the
    turn is the text between them. If they are not prefixes, as with templates that remove the reasoning of earlier
    turns, the template's ``{% generation %}`` marks are used; without such marks only the last turn counts. Without a
    chat template the messages are joined by empty lines, without roles.

    Args:
        max_length: longer dialogues are cut there.
        settings: variables for the template.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, settings: Mapping[str, Any] = FIXED_SETTINGS) -> None:
        self.tokenizer, self.max_length, self._settings = tokenizer, max_length, dict(settings)
        if tokenizer.has_chat_template:
            _ = tokenizer.pretrained  # one that cannot be loaded is no fault of a dialogue
        self.bare = bare_tokenizer(tokenizer)
        inner, whole = self.bare.encode("a").ids, tokenizer.encode("a")
        start = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), 0)
        self.prefix = tuple(whole[:start])  # the ids that the tokenizer puts before every text: BOS, or nothing
        self.skipped: Counter[str] = Counter()  # how many dialogues were left out, by reason
        self.refusal = ""  # the chat template's error for the first dialogue that it refused

    def encode(self, dialogues: Iterable[DataRecord]) -> list[Example]:
        """Encode the dialogues that have an answer within ``max_length``."""
        located = [turns for dialogue in dialogues if (turns := self._locate(dialogue.messages)) is not None]
        encodings = self.bare.encode_batch([text for text, _ in located], add_special_tokens=False)
        pairs = zip(encodings, located, strict=True)
        examples = [Example(*self._mark(encoding, spans)) for encoding, (_, spans) in pairs]
        with_answer = [example for example in examples if example.mask.any()]
        if len(with_answer) < len(examples):
            self.skipped["no room for an answer"] += len(examples) - len(with_answer)
        return with_answer

    def mask_of_prompt(self, messages: Sequence[Message], ids: Sequence[int]) -> np.ndarray:
        """Return (T,) bool: which ids of a prompt are earlier answers; all False if the template does not show it."""
        turns = _assistant_turns(messages)
        try:
            located = self._find_turns(messages, turns, ready=True) if turns else None
        except Exception:  # errors of jinja, and those that the template raises
            located = None
        if located is not None:
            encoded, mask = self._mark(self.bare.encode(located[0], add_special_tokens=False), located[1])
            if np.array_equal(encoded, ids):
                return mask
        return np.zeros(len(ids), dtype=bool)

    def check(self) -> None:
        """Raise TokenizerError if dialogues were skipped because of the chat template."""
        if self.refusal:
            raise TokenizerError(
                f"{self.tokenizer.folder}: the chat template refuses the dialogues ({self.refusal}): check that it "
                f"knows their roles, and that users and assistants take turns"
            )
        if self.skipped["unclear turns"]:
            raise TokenizerError(
                f"{self.tokenizer.folder}: the chat template does not show which tokens are the assistant's: the text "
                f"up to a turn is not a prefix of the whole text, and the template has no {{% generation %}} marks: "
                f"put these marks around the assistant's text in the template"
            )

    def _locate(self, messages: Sequence[Message]) -> tuple[str, list[Span]] | None:
        """Return the whole text and the assistant's turns in it; None if the dialogue must be left out."""
        turns = _assistant_turns(messages)
        if not turns:
            self.skipped["no assistant turn"] += 1
            return None
        messages = messages[: turns[-1] + 1]  # nothing is learnt from later turns
        try:
            located = self._find_turns(messages, turns) or self._by_prefix(messages, [len(messages) - 1])
        except Exception as error:  # errors of jinja, and those that the template raises
            self.skipped["refused by the chat template"] += 1
            self.refusal = self.refusal or str(error.__cause__ or error)
            return None
        if located is None:
            self.skipped["unclear turns"] += 1
        return located

    def _find_turns(
        self, messages: Sequence[Message], turns: Sequence[int], *, ready: bool = False
    ) -> tuple[str, list[Span]] | None:
        """Return the text and its turns; with ``ready``, the text ends with the prompt for the assistant."""
        if self.tokenizer.has_chat_template:
            return self._by_prefix(messages, turns, ready=ready) or self._by_marks(messages, ready=ready)
        text, spans = "", []
        for i, message in enumerate(messages):
            text += (JOIN if i else "") + message["content"]
            if i in turns:
                spans.append((len(text) - len(message["content"]), len(text)))
        return text + JOIN * ready, spans

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
            start, end = len(before), len(after)
            if messages[turn].get("finish_reason") == "length":  # cut off: without the end-of-turn token
                content = messages[turn]["content"].strip()
                at = whole.rfind(content, start, end)
                end = end if at < 0 else at + len(content)
            spans.append((start, end))
        return whole, spans

    def _by_marks(self, messages: Sequence[Message], *, ready: bool = False) -> tuple[str, list[Span]] | None:
        template = self.tokenizer.pretrained.get_chat_template()
        if not GENERATION_MARK.search(template):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[self.tokenizer.template_messages(messages)],
            chat_template=template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=ready,
            **{**self.tokenizer.pretrained.special_tokens_map, **self._settings},
        )
        (text,), (spans,) = rendered
        return (text, spans) if spans else None

    def _render(self, messages: Sequence[Message], *, ready: bool = False) -> str:
        return self.tokenizer.render_chat(messages, add_generation_prompt=ready, **self._settings)

    def _mark(self, encoding: Encoding, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and mask: a token counts if all of its characters lie in one span."""
        ids = np.asarray(encoding.ids, dtype=np.int32)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            inside = (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 0] < offsets[:, 1])
            mask |= self._until_end_of_turn(ids, inside)
        if not self.tokenizer.has_chat_template and self.prefix:  # a template writes BOS itself
            ids = np.concatenate([np.asarray(self.prefix, dtype=np.int32), ids])
            mask = np.concatenate([np.zeros(len(self.prefix), dtype=bool), mask])
        mask[:1] = False
        return ids[: self.max_length].copy(), mask[: self.max_length].copy()

    def _until_end_of_turn(self, ids: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """Remove the white space after the end-of-turn token, which templates write and models do not."""
        places = np.flatnonzero(inside)
        last = len(places) - 1
        while last > 0 and not self.bare.decode([int(ids[places[last]])], skip_special_tokens=False).strip():
            last -= 1
        if last >= 0 and int(ids[places[last]]) in self._special_ids:
            inside[places[last + 1 :]] = False
        return inside

    @cached_property
    def _special_ids(self) -> set[int]:
        return {token for token, added in self.bare.get_added_tokens_decoder().items() if added.special}


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    """List the assistant's turns but for one that opens the dialogue: it answers nothing."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]


# --- a corpus --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Corpus:
    """The data of a run."""

    examples: Sequence[Example] = ()  # dialogues, one row each
    # (N,) int32: the documents one after another, each followed by the end token. All of it counts.
    stream: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    # (D,) int64: the position of each document in the stream.
    starts: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    prefix: tuple[int, ...] = ()  # the ids before every window of the stream: BOS, or nothing
    skipped: Mapping[str, int] = field(default_factory=dict)  # how many records were left out, by reason

    @property
    def num_tokens(self) -> int:
        return sum(len(example.ids) for example in self.examples) + len(self.stream)


def read_examples(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    on_progress: OnProgress | None = None,
) -> Corpus:
    """Read and encode files and folders (``find_files``, ``read_records``); dialogues are cut at ``max_length``."""
    if max_length < 2:
        raise ConfigError(f"max_length must be at least 2 (a token, and one to predict), found {max_length}")
    encoder = DialogueEncoder(tokenizer, max_length)
    corpus = encode(read_files(find_files(sources), on_progress), encoder)
    check_not_empty(corpus, encoder, ", ".join(map(public_name, sources)))
    return corpus


def check_not_empty(corpus: Corpus, encoder: DialogueEncoder, names: str) -> None:
    """Raise DataError if no token is left to train on, or TokenizerError if that is the chat template's fault."""
    if not corpus.num_tokens:
        encoder.check()
        reasons = ", ".join(f"{count} with {why}" for why, count in corpus.skipped.items())
        raise DataError(
            f"{names}: nothing is left to train on ({reasons or 'there was no text at all'}): "
            f"give dialogues with answers (`draftwing data regenerate` writes them), documents, or a larger max_length"
        )


def read_texts(
    sources: Sequence[str | Path], tokenizer: Tokenizer, on_progress: OnProgress | None = None
) -> tuple[Ids, int]:
    """Read and encode files and folders for a datastore; every message of a dialogue is a text.

    Returns:
        The texts' ids, one after another (see ``join_texts``), and the number of files.
    """
    files, bare = find_files(sources), bare_tokenizer(tokenizer)
    texts = (
        text
        for record in read_files(files, on_progress)
        for text in ([message["content"] for message in record.messages] if record.text is None else [record.text])
    )
    parts = []
    for chunk in chunked(texts, len):
        encoded = (encoding.ids for encoding in bare.encode_batch_fast(chunk, add_special_tokens=False))
        parts.append(join_texts(filter(None, encoded)))
    if not sum(map(len, parts)):
        names = ", ".join(map(public_name, sources))
        raise DataError(f"{names}: there is no text in it: give files with text or dialogues")
    return np.concatenate(parts), len(files)


def encode(records: Iterable[DataRecord], encoder: DialogueEncoder) -> Corpus:
    """Encode documents and dialogues."""
    examples: list[Example] = []
    parts, starts, length, eos_id = [np.empty(0, dtype=np.int32)], [0], 0, 0

    def items() -> Iterator[DataRecord | _Piece]:
        for record in records:
            if record.text is None:
                yield record
            elif record.text.strip():
                yield from _cut(record.text, ended=record.ended)
            else:
                encoder.skipped["no text"] += 1

    for chunk in chunked(items(), _num_characters):
        examples += encoder.encode([item for item in chunk if isinstance(item, DataRecord)])
        pieces = [item for item in chunk if isinstance(item, _Piece)]
        if pieces and not length:
            eos_id = _find_eos(encoder.tokenizer)
        encodings = encoder.bare.encode_batch_fast([piece.text for piece in pieces], add_special_tokens=False)
        for encoding, piece in zip(encodings, pieces, strict=True):
            ids = [*encoding.ids, eos_id] if piece.is_end else encoding.ids
            parts.append(np.asarray(ids, dtype=np.int32))
            length += len(ids)
            if piece.is_last:
                starts.append(length)
    firsts = np.asarray(starts[:-1], dtype=np.int64)
    return Corpus(tuple(examples), np.concatenate(parts), firsts, encoder.prefix, dict(encoder.skipped))


class _Piece(NamedTuple):
    """A piece of a document. ``is_end``: the last one, which an end token follows."""

    text: str
    is_last: bool
    is_end: bool


def _cut(text: str, *, ended: bool) -> Iterator[_Piece]:
    """Cut a long text, at line ends if possible."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        yield _Piece(text[start:end], is_last=False, is_end=False)
        start = end
    yield _Piece(text[start:], is_last=True, is_end=ended)


def _num_characters(item: DataRecord | _Piece) -> int:
    if isinstance(item, _Piece):
        return len(item.text)
    return sum(len(message["content"]) for message in item.messages)


def chunked(items: Iterable[T], num_characters: Callable[[T], int]) -> Iterator[list[T]]:
    """Group items into lists of about ``CHUNK_CHARACTERS``; the last one may be empty."""
    chunk: list[T] = []
    total = 0
    for item in items:
        chunk.append(item)
        total += num_characters(item)
        if total >= CHUNK_CHARACTERS:
            yield chunk
            chunk, total = [], 0
    yield chunk


def _find_eos(tokenizer: Tokenizer) -> int:
    """Return the end token of tokenizer_config.json, else the first one of generation_config.json or config.json."""
    token = tokenizer.read_json("tokenizer_config.json").get("eos_token")
    eos_id: Any = tokenizer.fast.token_to_id(str(token.get("content") if isinstance(token, dict) else token))
    for name in ("generation_config.json", "config.json"):
        if eos_id is None:
            eos_id = text_config(tokenizer.read_json(name)).get("eos_token_id")
            eos_id = next(iter(eos_id), None) if isinstance(eos_id, list) else eos_id
    if not isinstance(eos_id, int):
        raise TokenizerError(
            f"{tokenizer.folder}: the end token, which follows every document, is unknown: expected eos_token in "
            f"tokenizer_config.json or eos_token_id in generation_config.json; add one"
        )
    return eos_id


def split(corpus: Corpus, validation_share: float, seed: int = 0) -> tuple[Corpus, Corpus]:
    """Return a training and a validation corpus, chosen by a hash of the content.

    Duplicates therefore stay on one side, and the order of the sources does not matter. Units are dialogues, and
    sections of up to 16,384 tokens of documents. Small corpora keep at least one unit on each side.
    """
    units = _units(corpus)
    held = held_out(units, validation_share, seed)
    if not held.any():
        return corpus, Corpus(prefix=corpus.prefix)
    return _part(corpus, units, ~held), _part(corpus, units, held)


def split_at(corpus: Corpus, limit: float, seed: int) -> tuple[Corpus, Corpus]:
    """Split like ``split``, and hold out the units whose hash is at most ``limit``, in [0, 1]; possibly all or none."""
    units = _units(corpus)
    held = _hashes(units, seed) <= limit
    return _part(corpus, units, ~held), _part(corpus, units, held)


def unit_hashes(corpus: Corpus, seed: int) -> np.ndarray:
    """Return (U,) the hashes of a corpus's units, see ``split``: uniform in [0, 1)."""
    return _hashes(_units(corpus), seed)


def _units(corpus: Corpus) -> list[np.ndarray]:
    """Return the ids of each dialogue, then of each section."""
    bounds = itertools.pairwise([*corpus.starts.tolist(), len(corpus.stream)])
    sections = (
        corpus.stream[at : min(at + SECTION_TOKENS, end)]
        for start, end in bounds
        for at in range(start, end, SECTION_TOKENS)
    )
    return [*(example.ids for example in corpus.examples), *sections]


def _hashes(units: Sequence[np.ndarray], seed: int) -> np.ndarray:
    salt = seed.to_bytes(8, "little", signed=True)
    digests = [hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=8, salt=salt).digest() for ids in units]
    return np.asarray([int.from_bytes(digest, "little") / 2**64 for digest in digests])


def held_out(units: Sequence[np.ndarray], share: float, seed: int = 0) -> np.ndarray:
    """Return (U,) bool: which units (ids each) are held out."""
    if not 0 <= share < 1:
        raise ConfigError(f"validation_share must be in [0, 1), found {share}")
    if share == 0:
        return np.zeros(len(units), dtype=bool)
    hashes = _hashes(units, seed)
    if len(np.unique(hashes)) < 2:
        raise DataError(
            f"all dialogues and sections of text ({len(units)}) are the same, so none can be held out: give more "
            f"data, or hold out nothing (validation_share 0)"
        )
    chosen: np.ndarray = ((hashes < share) | (hashes == hashes.min())) & (hashes != hashes.max())
    return chosen


def _part(corpus: Corpus, units: Sequence[np.ndarray], chosen: np.ndarray) -> Corpus:
    num = len(corpus.examples)
    examples = tuple(itertools.compress(corpus.examples, chosen[:num]))
    parts = list(itertools.compress(units[num:], chosen[num:]))
    starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)[:-1]
    return Corpus(examples, np.concatenate([Corpus().stream, *parts]), starts, corpus.prefix)


# --- batches: functions of (seed, number) alone, so that a resumed run reads the same ---------------------------------


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows that are trained on together, or those of them that one process has."""

    ids: Tensor  # (B, T) int64, 0 after the end of a row
    mask: Tensor  # (B, T) bool, see ``Example``; False after the end of a row
    lengths: Tensor  # (B,) int64
    # The rows of the whole batch that these are, and its number of rows. None: these are all.
    places: slice = field(default_factory=lambda: slice(None))
    num_rows: int | None = None

    @property
    def real(self) -> Tensor:
        """(B, T) bool: False after the end of a row."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]

    def to(self, device: torch.device) -> Batch:
        return replace(self, ids=self.ids.to(device), mask=self.mask.to(device), lengths=self.lengths.to(device))

    def rand(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """(B, ...) uniform numbers with the type and device of ``like``; ``shape`` is that of a row.

        They are drawn for the whole batch: those of a row do not depend on the number of processes.
        """
        rows = torch.rand(self.num_rows or len(self.ids), *shape, dtype=like.dtype, device=like.device)[self.places]
        return F.pad(rows, (0, 0) * len(shape) + (0, len(self.ids) - len(rows)))  # ``runnable`` may have added one

    def examples(self) -> Iterator[Example]:
        """Yield the rows without padding."""
        for ids, mask, length in zip(self.ids.numpy(), self.mask.numpy(), self.lengths.tolist(), strict=True):
            yield Example(ids[:length], mask[:length])

    def runnable(self) -> Batch:
        """Pad to at least one row and 3 tokens, the shortest input of an unroll; padding does not count.

        A process must take part in every update, even if it has no rows of a batch, or only tiny ones.
        """
        rows, tokens = max(1 - len(self.ids), 0), max(3 - self.ids.shape[1], 0)
        if not rows and not tokens:
            return self
        padding = (0, tokens, 0, rows)
        ids, mask, lengths = F.pad(self.ids, padding), F.pad(self.mask, padding), F.pad(self.lengths, (0, rows))
        return replace(self, ids=ids, mask=mask, lengths=lengths)


def collate(rows: Sequence[tuple[np.ndarray, np.ndarray]], length: int = 1) -> Batch:
    """Pad the ids and masks (T,) of rows to one batch, of at least ``length`` tokens."""
    longest = max([length, *(len(ids) for ids, _ in rows)])
    padded = torch.zeros(len(rows), longest, dtype=torch.int64)
    masks = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, (ids, mask) in enumerate(rows):
        padded[i, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        masks[i, : len(ids)] = torch.from_numpy(mask)
    return Batch(padded, masks, torch.tensor([len(ids) for ids, _ in rows], dtype=torch.int64))


class BatchPlan:
    """Chooses the rows of each batch, differently in every epoch, as a function of (seed, epoch) alone.

    Rows of similar length share a batch: each length class is shuffled and filled into batches, and the rest joins the
    next longer class. The number of batches is therefore the same in every epoch. A batch has at most
    ``tokens_per_batch`` tokens, including padding.
    """

    def __init__(self, lengths: np.ndarray, tokens_per_batch: int, seed: int) -> None:
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
            limits.append(min(limits[-1] - 1, int(limits[-1] / LENGTH_GROWTH)))
        self.lengths, self.seed = lengths, seed
        self._limits = np.asarray(limits[::-1])  # the greatest length of each class, ascending
        self._rows_per_batch = [tokens_per_batch // int(limit) for limit in self._limits]
        self._latest = (0, self.epoch(0))

    @property
    def num_tokens_per_epoch(self) -> int:
        """Tokens in the rows of an epoch, without padding."""
        return int(self.lengths.sum())

    @property
    def num_batches_per_epoch(self) -> int:
        return len(self._latest[1])

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Return the rows of each batch of an epoch."""
        rng = np.random.default_rng((self.seed, epoch, 0))
        classes = np.searchsorted(self._limits, self.lengths)
        batches: list[np.ndarray] = []
        carried = np.empty(0, dtype=np.int64)
        for number, size in enumerate(self._rows_per_batch):
            # Carried rows come first, so that none is carried again and again up to the longest class.
            rows = np.concatenate([carried, rng.permutation(np.flatnonzero(classes == number))])
            num_full = len(rows) // size
            batches += [rows[i * size : (i + 1) * size] for i in range(num_full)]
            carried = rows[num_full * size :]
        if len(carried):
            batches.append(carried)
        return [batches[i] for i in rng.permutation(len(batches))]

    def collate(
        self, number: int, make_row: Callable[[int, int], tuple[np.ndarray, np.ndarray]], rank: int, world_size: int
    ) -> tuple[list[int], Batch]:
        """Return the numbers of one rank's rows of a batch (possibly none), and a batch of them.

        It has the length of the whole batch, so that what is drawn for a position is the same on all ranks.

        Args:
            number: of the batch, counted over all epochs.
            make_row: returns ids and mask (T,) of a row, by epoch and row.
        """
        if world_size > self._rows_per_batch[-1]:
            raise ConfigError(
                f"a batch has room for {self._rows_per_batch[-1]} of the longest rows, and there are {world_size} "
                f"ranks: raise tokens_per_batch to {world_size * int(self._limits[-1])}, or lower max_length"
            )
        epoch, index = divmod(number, self.num_batches_per_epoch)
        if self._latest[0] != epoch:
            self._latest = (epoch, self.epoch(epoch))
        rows = self._latest[1][index]
        places = slice(rank, None, world_size)
        own: list[int] = rows[places].tolist()
        batch = collate([make_row(epoch, row) for row in own], int(self.lengths[rows].max()))
        return own, replace(batch, places=places, num_rows=len(rows))


class Batches(BatchPlan):
    """Cuts a corpus into batches of dialogues, and windows of the stream of documents, of up to ``max_length`` tokens.

    An epoch reads the stream as a ring from another position, so that it has every token once, always the same number
    of windows, and no token is always the first of its window.
    """

    def __init__(self, corpus: Corpus, tokens_per_batch: int, max_length: int, seed: int = 0) -> None:
        self._stream, self._prefix = corpus.stream, np.asarray(corpus.prefix, dtype=np.int32)
        self._window = max_length - len(self._prefix)
        if max_length < 2 or self._window < 1:
            raise ConfigError(f"max_length must be at least {max(2, len(self._prefix) + 1)}, found {max_length}")
        self.max_length = max_length
        self._examples = [example for example in corpus.examples if example.mask[:max_length].any()]
        full, rest = divmod(len(self._stream), self._window)
        windows = [self._window] * full + [rest] * (rest > 0)
        dialogues = [min(len(example.ids), max_length) for example in self._examples]
        lengths = [*dialogues, *(len(self._prefix) + length for length in windows)]
        super().__init__(np.asarray(lengths, dtype=np.int64), tokens_per_batch, seed)

    def batch(self, number: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return a batch, or one rank's rows of it (possibly none); see ``BatchPlan.collate``."""
        return self.collate(number, self._row, rank, world_size)[1]

    def _row(self, epoch: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        if row < len(self._examples):
            example = self._examples[row]
            return example.ids[: self.max_length], example.mask[: self.max_length]
        start = int(np.random.default_rng((self.seed, epoch, 1)).integers(max(1, len(self._stream))))
        at = (row - len(self._examples)) * self._window
        places = np.arange(at, min(at + self._window, len(self._stream))) + start
        ids = np.concatenate([self._prefix, self._stream.take(places, mode="wrap")])
        mask = np.ones(len(ids), dtype=bool)
        mask[: max(1, len(self._prefix))] = False
        return ids, mask


# --- draft vocabularies: the few thousand tokens that a draft head may propose (EAGLE-3, 2503.01840) ------------------


def draft_vocabulary(corpus: Corpus, vocab_size: int, draft_vocab_size: int, always: Iterable[int] = ()) -> Tensor:
    """Return the most frequent loss tokens of a corpus, of equally frequent ones the lower ids: (V_draft,) ascending.

    Args:
        vocab_size: V of the target's logits.
        draft_vocab_size: V_draft; at V or above, all tokens are returned.
        always: ids that are included at any frequency: the end tokens.
    """
    fixed = np.unique(np.fromiter(always, dtype=np.int64))
    if draft_vocab_size < max(1, len(fixed)):
        raise ConfigError(
            f"draft_vocab_size must be at least {max(1, len(fixed))} ({len(fixed)} ids are always in), found "
            f"{draft_vocab_size}"
        )
    if len(fixed) and not (fixed[0] >= 0 and fixed[-1] < vocab_size):
        raise ConfigError(f"always has ids outside the vocabulary of {vocab_size}: {fixed.tolist()}; leave them out")
    scores = _count_loss_tokens(corpus, vocab_size).astype(np.float64)
    scores[fixed] = np.inf
    return torch.from_numpy(np.sort(np.argsort(-scores, kind="stable")[:draft_vocab_size]).astype(np.int64))


def coverage_of(corpus: Corpus, target_ids: Tensor | None, vocab_size: int) -> float:
    """Return the share of a corpus's loss tokens in a draft vocabulary (None: the whole one)."""
    counts = _count_loss_tokens(corpus, vocab_size)
    return 1.0 if target_ids is None else float(counts[target_ids.cpu().numpy()].sum() / counts.sum())


def _count_loss_tokens(corpus: Corpus, vocab_size: int) -> np.ndarray:
    """Return (V,): how often each token is predicted."""
    loss_tokens = [example.ids[example.mask] for example in corpus.examples]
    counts = np.bincount(np.concatenate([corpus.stream, *loss_tokens]), minlength=vocab_size)
    if len(counts) > vocab_size:
        raise DataError(
            f"the data has token id {len(counts) - 1}, and the vocabulary has {vocab_size}: encode the data with the "
            f"target's own tokenizer"
        )
    if not counts.sum():
        raise DataError("the data has no token that counts in the loss: give documents, or dialogues with answers")
    return counts
