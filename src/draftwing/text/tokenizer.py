"""Text to token ids and back: the tokenizer and chat template of a model folder, and text streams.

``tokenizer.json`` is read by the ``tokenizers`` library; transformers is imported only for folders without one and for
chat templates.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from draftwing.checks import MAX_TOKENS, Argument, check_arguments
from draftwing.errors import ConfigError, DraftwingError, PromptError, TokenizerError, reason, shown
from draftwing.storage import check_regular, exists, read_json
from draftwing.text.prompts import check_text, prepare_messages

# Byte-level tokenizers write printable bytes as themselves, the others as characters from 256 on.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
# Attributes of transformers' tokenizers that name a special token.
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_MARK = "\ue000draftwing\ue000"  # stands for content, to see where a chat template puts it
_LOADING = threading.Lock()  # two threads cannot import transformers at once


class Tokenizer:
    """Encodes prompts and decodes output.

    Args:
        folder: a Hugging Face folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / "tokenizer.json"
        self._slow: Any = None
        self.fast: FastTokenizer
        if not exists(file):
            if exists(folder / "adapter_config.json"):
                raise TokenizerError(
                    f"{folder}: a LoRA adapter without a tokenizer: merge it into its base model with peft's "
                    f"merge_and_unload, and give the result"
                )
            try:
                self.fast = self.pretrained.backend_tokenizer
            except Exception as error:  # transformers raises many kinds of errors
                raise TokenizerError(
                    f"{folder}: no tokenizer can be read from this folder ({error}): put the model's tokenizer.json "
                    f"next to its config.json"
                ) from error
            return
        try:
            check_regular(file)
            self.fast = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"{file}: cannot be read ({error}): download it again") from error
        if not self.fast.get_vocab_size(with_added_tokens=True):
            raise TokenizerError(f"{file}: the tokenizer has no tokens: download it again")
        try:
            self.fast.add_tokens(self._tokens_to_add())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(
                f"{folder}: the tokens that tokenizer_config.json, special_tokens_map.json or added_tokens.json adds "
                f"cannot be read ({error!r}): download these files again"
            ) from error
        self.fast.encode_special_tokens = bool(self._config.get("split_special_tokens"))

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> Tokenizer:
        """Wrap a fast tokenizer of transformers; later additions to its vocabulary count."""
        wrapper = cls.__new__(cls)
        wrapper.folder = Path(str(tokenizer.name_or_path))
        wrapper.fast, wrapper._slow = tokenizer.backend_tokenizer, tokenizer
        return wrapper

    @property
    def pretrained(self) -> Any:
        """The tokenizer of transformers, loaded at first use: the import takes seconds."""
        if self._slow is None:
            with _LOADING:
                if self._slow is None:
                    self._slow = self._load_pretrained()
        return self._slow

    def _load_pretrained(self) -> Any:
        try:
            if self._is_complete():  # 2 s faster, since the model type is not imported
                from transformers import PreTrainedTokenizerFast

                return PreTrainedTokenizerFast.from_pretrained(self.folder)
            from transformers import AutoTokenizer

            # Without an explicit False, transformers asks on stdin whether to run the folder's own code.
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds of errors, and what its backends raise
            reason = " ".join(str(error).split())
            fix = "install what is missing" if isinstance(error, ImportError) else "download its files again"
            raise TokenizerError(
                f"{self.folder}: transformers cannot load this tokenizer ({reason}): {fix}. A tokenizer that needs "
                f"Python code of its folder is not supported"
            ) from error

    def _is_complete(self) -> bool:
        """Return True if the folder has the chat template and its tokens: no model type's defaults are needed."""
        template, file = self._config.get("chat_template"), self.folder / "chat_template.jinja"
        if file.exists():
            template = file.read_text("utf-8")
        config = self._config_with_map
        is_known = isinstance(template, str) and all(name in config for name in _NAMED if name in template)
        return is_known and "auto_map" not in config and (self.folder / "tokenizer.json").exists()

    def _tokens_to_add(self) -> list[AddedToken]:
        """Tokens that only tokenizer_config.json and older files next to it name, in transformers' order."""
        known = {repr(token) for token in self.fast.get_added_tokens_decoder().values()}
        names = {token.content for token in self.fast.get_added_tokens_decoder().values()}
        config, listed = self._config_with_map, dict[int, AddedToken]()
        if "added_tokens_decoder" in config:
            listed = {int(index): _added_token(token) for index, token in config["added_tokens_decoder"].items()}
        else:
            special = {_added_token(value).content for key, value in config.items() if key in _NAMED and value}
            for content, index in self.read_json("added_tokens.json").items():
                is_special = content in special
                listed[index] = AddedToken(content, normalized=not is_special, special=is_special)
        tokens = [token for _, token in sorted(listed.items(), key=lambda item: item[0]) if repr(token) not in known]
        names.update(token.content for token in tokens)
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        own = [value for key, value in config.items() if key.endswith("_token") and key not in _NAMED]
        named = [*(config.get(name) for name in _NAMED), *(value for value in own if isinstance(value, str | dict))]
        for value in [*named, *(extra.values() if isinstance(extra, dict) else extra)]:
            token = _added_token(value) if value else None
            if token is not None and token.content not in names:
                names.add(token.content)
                tokens.append(token)
        return tokens

    @property
    def has_chat_template(self) -> bool:
        """True if prompts are meant to be wrapped as a dialogue."""
        return bool(self._config.get("chat_template")) or (self.folder / "chat_template.jinja").exists()

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self.read_json("tokenizer_config.json")

    @property
    def _config_with_map(self) -> dict[str, Any]:
        """``tokenizer_config.json``, with the special tokens of an older file unless it lists all added ones."""
        listed = "added_tokens_decoder" in self._config
        return self._config if listed else {**self._config, **self.read_json("special_tokens_map.json")}

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object in a file of the folder; empty if there is none."""
        file = self.folder / name
        try:
            content = read_json(file) if file.exists() else {}
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{file}: not readable as JSON ({error}): download it again") from error
        if not isinstance(content, dict):
            raise TokenizerError(f"{file}: expected a JSON object, found {shown(content)}: download it again")
        return content

    @cached_property
    def vocab_hash(self) -> str:
        """16 hexadecimal digits made of every token and its id."""
        pairs = json.dumps(sorted(self.fast.get_vocab().items()))
        return hashlib.sha256(pairs.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with special tokens. Raises PromptError if it is empty or cannot be encoded."""
        if not text:
            raise PromptError("the prompt is empty: give some text to continue")
        return self._encode(text, add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a part of a text, without special tokens. Raises PromptError if it cannot be encoded."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A training script may have left both in tokenizer.json; transformers resets them before every call, too.
        if self.fast.truncation is not None:
            self.fast.no_truncation()
        if self.fast.padding is not None:
            self.fast.no_padding()
        return list(self.fast.encode(check_text(text), add_special_tokens=add_special_tokens).ids)

    def template_reads(self, name: str) -> bool:
        """Return True if the chat template uses a variable, such as ``tools``."""
        return re.search(rf"\b{re.escape(name)}\b", str(self.pretrained.chat_template or "")) is not None

    @cached_property
    def template_options(self) -> frozenset[str]:
        """Names of options of ``apply_chat_template``, which cannot be variables of a template."""
        return frozenset(inspect.signature(self.pretrained.apply_chat_template).parameters)

    @cached_property
    def _template_reads_parts(self) -> bool:
        """True if the chat template shows content only in the form of parts (``[{"type": "text", "text": ...}]``)."""
        return not self._shows([{"role": "user", "content": _MARK}]) and self._shows(
            [{"role": "user", "content": [{"type": "text", "text": _MARK}]}]
        )

    @cached_property
    def template_reads_system(self) -> bool:
        """True if the chat template shows system messages."""
        content: Any = [{"type": "text", "text": _MARK}] if self._template_reads_parts else _MARK
        return self._shows([{"role": "system", "content": content}, {"role": "user", "content": "x"}])

    def _shows(self, messages: list[dict[str, Any]]) -> bool:
        try:
            return _MARK in self._render(messages)
        except TokenizerError:
            return False

    def _render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        if not self.has_chat_template:
            raise TokenizerError("this model has no chat template: prompt it with plain text")
        options = {"add_generation_prompt": True, **variables, "tokenize": False}
        tokenizer = self.pretrained
        try:
            return str(tokenizer.apply_chat_template(messages, **options))
        except Exception as error:  # jinja errors, and whatever the template itself raises
            raise TokenizerError(
                f"the chat template refuses these messages: {reason(error)}: change them, or correct the template"
            ) from error

    def template_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with their content in the form that the chat template reads: text, or parts of type text."""
        prepared = [dict(message) for message in messages]
        if self.has_chat_template and self._template_reads_parts:
            for message in prepared:
                if isinstance(message.get("content"), str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
        return prepared

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the text of a dialogue through the chat template; ``variables`` are the template's."""
        return self._render(self.template_messages(messages), **variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Return the ids of a dialogue through the chat template, ready for the assistant's turn.

        Content may be text or parts of type text; the template gets the form that it reads. If the last message is the
        assistant's and has ``"prefix": True``, its turn stays open, and the model continues it.

        Args:
            messages: role and content, and whatever else the template reads.
            variables: of the template, such as ``tools``.
        """
        dialogue, is_open = prepare_messages(messages)
        if is_open:
            dialogue[-1]["content"] += _MARK
            variables = {**variables, "add_generation_prompt": False}
        text = self.render_chat(dialogue, **variables)
        if is_open:
            text, mark, _ = text.rpartition(_MARK)
            if not mark:
                raise TokenizerError("the chat template does not show the last message, so `prefix` cannot continue it")
        return self.encode_plain(text)

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return str(self.fast.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        text = self.fast.id_to_token(token)
        if text is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(_BYTES[character] for character in text)
            except KeyError:  # an added token, stored as plain text
                return text.encode("utf-8", "replace")
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", text)
        return bytes.fromhex(byte[1]) if byte else text.replace("\u2581", " ").encode("utf-8", "replace")

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self.fast.decoder
        return decoder is not None and b'"ByteLevel"' in bytes(decoder.__getstate__())

    def difference(self, other: Tokenizer) -> str | None:
        """Return the first difference between the vocabulary of a target and that of a draft model; None for none."""
        ours, theirs = self.fast.get_vocab(), other.fast.get_vocab()
        if ours == theirs:
            return None
        moved = (token for token in ours if theirs.get(token) != ours[token])
        different = min(moved, key=lambda token: ours[token], default=None)
        if different is None:
            return f"it has {len(theirs) - len(ours)} more tokens"
        return (
            f"token {ours[different]} is {different!r} for the target and {other.fast.id_to_token(ours[different])!r} "
            f"for the draft"
        )

    def named_token(self, name: str) -> int | None:
        """Return the id of a token that has a role, such as ``eos_token``; None if it has none."""
        value = getattr(self._slow, name, None) if self._slow is not None else self._config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        return self.fast.token_to_id(content) if isinstance(content, str) else None


def _added_token(value: Any) -> AddedToken:
    """A token as tokenizer_config.json writes it: a string, or an object with ``content``."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {name: bool(value[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in value}
    return AddedToken(str(value["content"]), special=bool(value.get("special", False)), **flags)


_BROKEN = "\ufffd"  # decoders write it for bytes that are no character, or not yet
_CONTEXT_IDS = 8  # ids of the prompt in the first window; doubled until they decode to whole characters
# A character has at most four bytes: if a window has not reached a character's end after this many ids, its bytes will
# never be one, and waiting longer would hold the text back forever.
_MAX_OPEN_IDS = 16


class TokenDecoder(Protocol):
    """The method of a tokenizer that a stream needs; ``tokenizers.Tokenizer`` has it."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of ``ids``, with U+FFFD for bytes that are no character."""
        ...


_ARGUMENTS = {
    "skip_special_tokens": Argument((bool,), "True or False"),
    "min_ids": Argument((int,), "a whole number of at least 0", least=0),
}


def check_decoder(tokenizer: object) -> None:
    """Raise ConfigError if a tokenizer cannot decode ids as a ``TokenDecoder`` does."""
    try:
        text = tokenizer.decode([], skip_special_tokens=True)  # type: ignore[attr-defined]
    except Exception:  # raised by the caller's own class
        text = None
    if not isinstance(text, str):
        raise ConfigError(
            f"tokenizer must have a method decode(ids, skip_special_tokens=...) that returns a text, found "
            f"{shown(tokenizer)}: pass LM.tokenizer, or a tokenizers.Tokenizer"
        )


def _check_ids(name: str, ids: Sequence[int]) -> None:
    is_list = type(ids) in (list, tuple, range) and len(ids) <= MAX_TOKENS
    if not is_list or not all(type(token) is int and 0 <= token < 2**32 for token in ids):
        raise PromptError(
            f"{name} must be a list of token ids (ints), found {shown(ids)}: convert arrays with .tolist()"
        )


class TextStream:
    """The printable text of a growing list of token ids, up to the first stop string.

    Tokens are not characters: a character may take several tokens, a token may hold the end of one character and the
    start of the next, and some tokenizers drop the space before the first token they decode. A stream therefore decodes
    a short sliding window of ids: the text of its front is already out, and the rest is new.

    The text depends on the ids alone, not on how they were grouped into pushes: five ids accepted in one step give the
    same text as five steps of one id. Half a character never comes out, and neither does a tail that may turn out to be
    the beginning of a stop string.

    Args:
        tokenizer: anything with ``decode``.
        prompt_ids: the ids before the first pushed one; their text is not given out, but the first id may continue it.
        stop: strings before whose first character the text ends. The first one to be complete counts; of several that
            are complete at the same character, the longest. The prompt is never searched.
        skip_special_tokens: for ``decode``.
        min_ids: stop strings that are completed by the first ``min_ids`` ids do not count.

    Raises:
        ConfigError: ``stop`` is not a tuple of strings of at least one character, or an argument has a wrong type.
        PromptError: ``prompt_ids`` is not a list of token ids.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        prompt_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        *,
        skip_special_tokens: bool = True,
        min_ids: int = 0,
    ) -> None:
        if type(stop) not in (tuple, list):
            raise ConfigError(
                f"stop: expected a tuple of strings, found {shown(stop)}; write a single one as ('...',)."
            )
        for i, item in enumerate(stop):
            if not isinstance(item, str) or not item:
                raise ConfigError(
                    f"stop[{i}]: expected a string of one character or more, found {shown(item)}; omit it."
                )
        check_arguments(_ARGUMENTS, {"skip_special_tokens": skip_special_tokens, "min_ids": min_ids})
        check_decoder(tokenizer)
        _check_ids("prompt_ids", prompt_ids)
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop, self._min_ids = tuple(stop), min_ids
        self._single_texts: dict[int, str] = {}  # by id
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._stopped: str | None = None
        self._num_tokens = 0
        self._flushed = False
        count = _CONTEXT_IDS
        self._slide(list(prompt_ids[-count:]), 0)
        # Ids that decode to nothing (special tokens) are no context for a leading space, and a decoder of byte tokens
        # that starts inside a character takes the bytes behind it for broken too.
        while count < len(prompt_ids) and (not self._text or self._text.startswith(_BROKEN)):
            count *= 2
            self._slide(list(prompt_ids[-count:]), 0)
        # If the prompt ends inside a character, the output may complete it, and then that character is new text.
        self._ragged = self._text if self._text.endswith(_BROKEN) else ""
        self._open_from = 0 if self._ragged else len(self._window)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stopped

    @property
    def num_tokens_kept(self) -> int:
        """The number of pushed ids up to and including the one that completed the stop string; without one, all."""
        return self._num_tokens

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids (any number of them) and return the text that has become certain, possibly ``""``.

        After a stop string, ids are ignored and the text is ``""``.

        Raises:
            DraftwingError: ``flush`` was called before.
            PromptError: ``ids`` is not a list of token ids.
        """
        _check_ids("ids", ids)
        if self._flushed:
            raise DraftwingError(
                "TextStream.push: expected an open stream, found one whose flush() was called; "
                "make a new TextStream with the ids so far as its prompt_ids."
            )
        texts = []
        # One id at a time: that makes the text independent of the grouping.
        for token in ids:
            if self._stopped is not None:
                break
            self._num_tokens += 1
            texts.append(self._settle(self._decode_next(token)))
        return "".join(texts)

    def flush(self) -> str:
        """End the stream and return the rest: a partial stop string, and U+FFFD for half a character.

        Returns ``""`` after a stop string, and when called again.
        """
        if self._flushed or self._stopped is not None:
            self._flushed = True
            return ""
        self._flushed = True
        text = self._settle(self._text[self._num_shown(self._text) :])
        return text if self._stopped is not None else text + self._held

    def _decode(self, ids: list[int]) -> str:
        text = self._single_texts.get(ids[0]) if len(ids) == 1 else None
        if text is None:
            text = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
            if len(ids) == 1:
                self._single_texts[ids[0]] = text
        return text

    def _slide(self, window: list[int], open_from: int) -> None:
        """Decode ``window`` from now on, whose text is out; the ids from ``open_from`` on stay in the next window."""
        self._window = window
        self._open_from = open_from
        self._text: str = self._decode(window) if window else ""
        self._shown = len(self._text)
        self._ragged = ""

    def _num_shown(self, text: str) -> int:
        return num_common(self._ragged, text) if self._ragged else self._shown

    def _decode_next(self, token: int) -> str:
        """Add ``token`` to the window and return the text that has become certain."""
        self._window.append(token)
        text = self._decode(self._window)
        if text and text == self._text and not self._decode([token]):
            # A special token that is skipped: it would be no context as the window's only id.
            self._window.pop()
            return ""
        changed, self._text = text != self._text, text
        start = self._num_shown(text)
        if not text.endswith(_BROKEN):
            end = len(text)
            if changed:
                rest = self._window[self._open_from :]
                self._slide(rest, len(rest))
                return text[start:end]
        elif len(self._window) - self._open_from > _MAX_OPEN_IDS:
            # All U+FFFD but the last are final; the last one may still be a character that lacks its end.
            end = len(text) - 1
            self._slide(self._window[-_CONTEXT_IDS:], 0)
            self._shown -= 1
            return text[start:end]
        else:
            end = len(text.rstrip(_BROKEN))
        if end > start:
            self._shown, self._ragged = end, ""
        return text[start:end]

    def _settle(self, piece: str) -> str:
        """Add ``piece`` to the text and return the part that can no longer belong to a stop string."""
        old, held = len(self._held), self._held + piece  # no stop string ends within the old part
        places = [(held.find(stop, max(old - len(stop) + 1, 0)), stop) for stop in self._stop]
        hits = [(at + len(stop), at, stop) for at, stop in places if at >= 0]
        if hits and self._num_tokens > self._min_ids:
            _, at, self._stopped = min(hits)
            self._held = ""
            return held[:at]
        cut = len(held) - max((_overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[cut:]
        return held[:cut]


def num_common(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of items at the start of two sequences that are equal."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``, without being all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
