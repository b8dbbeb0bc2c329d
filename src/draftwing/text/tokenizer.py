"""A model folder's tokenizer: text to ids and back, its chat template, and whether two mean the same.

``tokenizer.json`` is read by the ``tokenizers`` library; transformers is imported only for folders without one
and for chat templates.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from draftwing.errors import PromptError, TokenizerError
from draftwing.text.prompts import check_text

# How byte-level tokenizers write bytes: printable ones as themselves, the others as characters from 256 on.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
_LOADING = threading.Lock()  # transformers cannot be imported by two threads at once


class Tokenizer:
    """Encodes prompts and decodes what was written.

    Args:
        folder: a Hugging Face folder.

    Raises:
        TokenizerError: the folder has no tokenizer, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / "tokenizer.json"
        self._slow: Any = None
        try:
            if file.exists():
                self.fast = FastTokenizer.from_file(str(file))
            else:
                self.fast = self._transformers.backend_tokenizer
        except Exception as error:  # both libraries raise bare Exceptions and many kinds of errors
            raise TokenizerError(
                f"{folder}: no tokenizer can be read from this folder ({error}): put the model's tokenizer.json beside "
                f"its config.json"
            ) from error

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> Tokenizer:
        """A fast tokenizer that transformers has loaded already; later additions to its vocabulary count."""
        own = cls.__new__(cls)
        own.folder = Path(str(tokenizer.name_or_path))
        own.fast, own._slow = tokenizer.backend_tokenizer, tokenizer
        return own

    @property
    def _transformers(self) -> Any:
        """The tokenizer as transformers reads it, at first use: importing that takes seconds."""
        if self._slow is None:
            with _LOADING:
                if self._slow is None:
                    from transformers import AutoTokenizer

                    self._slow = AutoTokenizer.from_pretrained(self.folder)
        return self._slow

    @cached_property
    def _config(self) -> dict[str, Any]:
        file = self.folder / "tokenizer_config.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{file}: not readable as JSON ({error}): download it again") from error
        return found if isinstance(found, dict) else {}

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts are meant to be wrapped as a dialogue."""
        return bool(self._config.get("chat_template")) or (self.folder / "chat_template.jinja").exists()

    @cached_property
    def vocab_hash(self) -> str:
        """16 hexadecimal digits that stand for every token and its id."""
        pairs = json.dumps(sorted(self.fast.get_vocab().items()))
        return hashlib.sha256(pairs.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the model expects in front.

        Raises:
            PromptError: the text is empty, or cannot be encoded.
        """
        if not text:
            raise PromptError("the prompt is empty: give some text to go on from")
        return list(self.fast.encode(check_text(text)).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text as it stands inside of another one: no special tokens, and none for an empty text.

        Raises:
            PromptError: the text cannot be encoded.
        """
        return list(self.fast.encode(check_text(text), add_special_tokens=False).ids)

    def template_reads(self, name: str) -> bool:
        """Whether the chat template makes use of a variable, such as ``tools``."""
        return re.search(rf"\b{re.escape(name)}\b", str(self._transformers.chat_template or "")) is not None

    @cached_property
    def template_options(self) -> frozenset[str]:
        """Names that say how the chat template is applied, and so cannot be variables of it."""
        return frozenset(inspect.signature(self._transformers.apply_chat_template).parameters)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Ids of a dialogue through the chat template, ready for the assistant's turn.

        Args:
            messages: role and content, and whatever else the template reads.
            variables: of the template, such as ``tools``.

        Raises:
            TokenizerError: there is no chat template, or it refuses the messages.
            PromptError: what it renders cannot be encoded.
        """
        if not self.has_chat_template:
            raise TokenizerError(f"{self.folder}: this tokenizer has no chat template: prompt it with plain text")
        try:
            text = self._transformers.apply_chat_template(
                [dict(message) for message in messages],
                **{"add_generation_prompt": True, **variables, "tokenize": False},
            )
        except Exception as error:  # jinja errors, and whatever the template itself raises
            raise TokenizerError(f"{self.folder}: the chat template refuses these messages: {error}") from error
        return list(self.fast.encode(check_text(str(text)), add_special_tokens=False).ids)

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        return str(self.fast.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; a part of a character has no text, but bytes it has."""
        found = self.fast.id_to_token(token)
        if found is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(_BYTES[character] for character in found)
            except KeyError:  # one that was added as it stands
                return found.encode("utf-8", "replace")
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", found)
        return bytes.fromhex(byte[1]) if byte else found.replace("\u2581", " ").encode("utf-8", "replace")

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self.fast.decoder
        return decoder is not None and b'"ByteLevel"' in bytes(decoder.__getstate__())

    def check_same(self, other: Tokenizer, name: str) -> None:
        """Raise TokenizerError unless ``other`` gives every text the same ids."""
        ours, theirs = self.fast.get_vocab(), other.fast.get_vocab()
        if ours == theirs:
            return
        moved = (token for token in ours if theirs.get(token) != ours[token])
        different = min(moved, key=lambda token: ours[token], default=None)
        detail = (
            f"it has {len(theirs) - len(ours)} more tokens"
            if different is None
            else f"token {ours[different]} is {different!r} for the target and "
            f"{other.fast.id_to_token(ours[different])!r} for the draft"
        )
        raise TokenizerError(
            f"draft model {name} has another tokenizer than the target ({detail}): a draft model must share the "
            f"target's; choose another, or draft='lookup'"
        )
