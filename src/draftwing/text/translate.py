"""Text between two tokenizers, for a draft model whose tokenizer is not the target's.

What the two have in common are bytes: a token is a piece of the text's bytes, which may begin or end inside a
character. ``Translation`` compares two vocabularies token by token. ``DraftText`` keeps the text of a row in the draft
model's ids while the target writes it, and ``Translation.to_target`` returns the target's ids of a draft (string-level
exact match, SLEM, 2502.05202). Special tokens are no text: they are matched by name, or as the begin and end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, takewhile

from draftwing.text.tokenizer import Tokenizer, num_common

WINDOW = 8  # tokens before new text that are encoded again with it: more than the parts of nearly all words
SAME_SHARE = 0.99  # common tokens, as a share of both vocabularies, from which they are matched one to one


class Pieces:
    """The tokens of a tokenizer as bytes.

    Args:
        eos_ids: the model's end tokens, the main one first.

    Attributes:
        bytes: the text of every token; empty for a special one.
        ids: the token of each of these texts.
        specials: the names of the special tokens.
        bos: the begin token, or None.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int] = ()) -> None:
        fast, vocab = tokenizer.fast, tokenizer.fast.get_vocab(with_added_tokens=True)
        self.tokenizer = tokenizer
        self.bos = tokenizer.named_token("bos_token")
        named = tokenizer.named_token("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*([] if named is None else [named]), *eos_ids]))
        added = fast.get_added_tokens_decoder()
        ends = {token for token in (self.bos, *self.eos_ids) if token is not None}
        self.specials = {token: name for name, token in vocab.items() if token in ends or is_special(added.get(token))}
        self.bytes = [b""] * (1 + max(vocab.values(), default=-1))
        self.ids: dict[bytes, int] = {}
        spelled: dict[bytes, int] = {}  # tokens such as <0x0A>, which are used if a character has no token
        for name, token in sorted(vocab.items(), key=lambda item: item[1]):
            if token not in self.specials:
                piece = self.bytes[token] = tokenizer.token_bytes(token)
                into = spelled if name.startswith("<0x") and len(name) == 6 else self.ids
                into.setdefault(piece, token)
        self._byte_ids = {**{piece: token for piece, token in self.ids.items() if len(piece) == 1}, **spelled}
        self.ids = {**spelled, **self.ids}
        self.ids.pop(b"", None)

    def __len__(self) -> int:
        return len(self.bytes)

    @cached_property
    def prefix(self) -> list[int]:
        """The special tokens that this tokenizer puts before a text."""
        ids = self.tokenizer.fast.encode("", add_special_tokens=True).ids
        return list(takewhile(lambda token: token in self.specials and token not in self.eos_ids, ids))

    @cached_property
    def puts_space(self) -> bool:
        """True if this tokenizer puts a space before a text."""
        return b"".join(map(self.of, self.tokenizer.encode_plain("x"))) == b" x"

    def of(self, token: int) -> bytes:
        """Return the bytes of a token; none if it is special or unknown."""
        return self.bytes[token] if token < len(self.bytes) else b""

    def encode(self, data: bytes) -> list[int] | None:
        """Return the tokens of a part of a text, if their bytes are exactly ``data``.

        Some tokenizers put a space before a text, or drop one: then the text is encoded without it, or after a line
        break. None for half a character, and if the tokenizer changes the text otherwise.
        """
        if not data:
            return []
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        for variant in (text, text.removeprefix(" "), "\n" + text):
            ids = self.tokenizer.encode_plain(variant)
            at = self._place(ids, len(data))
            if at is not None and b"".join(map(self.of, ids[at:])) == data:
                return ids[at:]
        return None

    def _place(self, ids: Sequence[int], num_bytes: int) -> int | None:
        """Return the number of ids before the last ``num_bytes`` bytes; None if a token crosses that point."""
        at = len(ids)
        while num_bytes > 0 and at:
            at -= 1
            num_bytes -= len(self.of(ids[at]))
        return at if num_bytes == 0 else None

    def spell(self, data: bytes) -> list[int] | None:
        """Return the tokens of single bytes; None if one is missing."""
        ids = [self._byte_ids.get(data[at : at + 1], -1) for at in range(len(data))]
        return None if -1 in ids else ids

    def follow(self, before: bytes, data: bytes) -> list[int]:
        """Return the tokens that continue the text ``before``, up to the last whole character of ``data``.

        ``before`` ends with a token and starts with a character. If the tokenizer would join both into one token,
        ``data`` is encoded by itself.
        """
        both = before + data
        size = num_whole(both) - len(before)
        if size <= 0:
            return []
        ids = self.encode(both[: len(before) + size])
        at = None if ids is None else self._place(ids, size)
        if ids is not None and at is not None:
            return ids[at:]
        inside = sum(1 for _ in takewhile(is_continuation, data[:size]))
        first, rest = self.spell(data[:inside]), self.encode(data[inside:size])
        return [] if first is None else [*first, *(rest or [])]


def is_special(added: object) -> bool:
    """Return True for an added token of the ``tokenizers`` library that is no text."""
    return bool(getattr(added, "special", False))


def is_continuation(byte: int) -> bool:
    """Return True for a byte of UTF-8 that is not the first of its character."""
    return byte & 0xC0 == 0x80


def num_whole(data: bytes | bytearray) -> int:
    """Return the number of bytes up to the end of the last whole character."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if not is_continuation(byte):
            size = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return len(data) - back if size > back else len(data)
    return len(data)


class Translation:
    """Two tokenizers compared.

    Attributes:
        to_draft: for every target token the draft model's with the same bytes or meaning; -1 for none.
        is_one_to_one: nearly all tokens of both are the same, under other ids.
    """

    def __init__(self, target: Pieces, draft: Pieces) -> None:
        self.target, self.draft = target, draft
        self.to_draft = [draft.ids.get(piece, -1) if piece else -1 for piece in target.bytes]
        shared = sum(1 for piece in target.ids if piece in draft.ids)
        self.is_one_to_one = shared >= SAME_SHARE * max(len(target.ids), len(draft.ids), 1)
        for token in target.specials:
            self.to_draft[token] = _counterpart(token, target, draft)

    def special_to_target(self, token: int) -> int:
        """Return the target's counterpart of a special draft token; -1 for none."""
        return _counterpart(token, self.draft, self.target)

    @cached_property
    def first(self) -> list[int]:
        """For every draft token the target's token that its text most likely begins with; -1 for none."""
        ids = self.target.ids
        firsts = []
        for token, piece in enumerate(self.draft.bytes):
            sizes = range(len(piece), 0, -1)
            firsts.append(next((ids[piece[:size]] for size in sizes if piece[:size] in ids), -1))
            if token in self.draft.specials:
                firsts[-1] = self.special_to_target(token)
        return firsts

    def tail(self, tokens: Sequence[int]) -> bytes:
        """Return the last text of a row in the target's tokens, from the start of a word if possible."""
        pieces, stop = list[bytes](), len(tokens)
        for at in range(stop - 1, max(stop - 2 * WINDOW, 0) - 1, -1):
            if tokens[at] in self.target.specials:
                break
            pieces.append(self.target.of(tokens[at]))
            if len(pieces) >= WINDOW and pieces[-1][:1].isspace():
                break
        data = b"".join(reversed(pieces))
        return data[sum(1 for _ in takewhile(is_continuation, data)) :]

    def to_target(self, before: bytes, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Translate draft tokens that follow the text ``before`` (see ``Pieces.follow``).

        Returns the target's tokens, and for each the number of draft tokens that it needs.
        """
        pieces = [self.draft.of(token) for token in takewhile(lambda token: token not in self.draft.specials, ids)]
        ends = list(accumulate(map(len, pieces)))
        tokens = self.target.follow(before, b"".join(pieces))
        counts, needed, size = [], 0, 0
        for token in tokens:
            size += len(self.target.of(token))
            while needed < len(ends) and (not needed or ends[needed - 1] < size):
                needed += 1
            counts.append(needed)
        if len(pieces) < len(ids) and size == (ends[-1] if ends else 0):
            end = self.special_to_target(ids[len(pieces)])
            if end >= 0:
                tokens, counts = [*tokens, end], [*counts, len(pieces) + 1]
        return tokens, counts


def _counterpart(token: int, ours: Pieces, theirs: Pieces) -> int:
    """Return the other vocabulary's special token with this one's name or role; -1 for none."""
    name = ours.specials[token]
    same = next((other for other, known in theirs.specials.items() if known == name), None)
    if same is not None:
        return same
    if token in ours.eos_ids and theirs.eos_ids:
        return theirs.eos_ids[0]
    return theirs.bos if token == ours.bos and theirs.bos is not None else -1


class DraftText:
    """A row's text in the draft model's tokens, while the target writes it.

    The last tokens are encoded again with each new part of the text, because parts of one word may become one token.

    Attributes:
        ids: the draft model's tokens of the whole text.
        num_stable: the number of ``ids`` that have not changed since ``settle``.
        is_complete: all of the text is in ``ids``; False if it ends inside a character that the draft model cannot
            spell.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation, self.ids, self.is_complete = translation, list(translation.draft.prefix), True
        self.num_stable = 0
        self._num_taken = 0  # target tokens
        # The first id that may be encoded again, the bytes from there on, and where each of their tokens ends.
        self._restart()

    def settle(self) -> None:
        """Take ``ids`` for final, for ``num_stable``."""
        self.num_stable = len(self.ids)

    def extend_to(self, tokens: Sequence[int]) -> None:
        """Read a row's further tokens: ``tokens`` begins with those that were read before."""
        target, to_draft = self._translation.target, self._translation.to_draft
        for at in range(self._num_taken, len(tokens)):
            token = tokens[at]
            if token not in target.specials:
                self._data += target.of(token)
                continue
            self._encode()
            special = to_draft[token]
            if special >= 0 and not (at == 0 and special in self.ids):  # a begin token that is there already
                self.ids.append(special)
            self._restart()
        self._num_taken = len(tokens)
        self._encode()

    def _restart(self, rest: bytes | None = None) -> None:
        """Let the next bytes begin a text; with ``rest``, continue one."""
        self._start, self._data, self._ends = len(self.ids), bytearray(rest or b""), list[int]()
        self._has_space = rest is None and self._translation.target.puts_space
        self._puts_space = rest is None and self._translation.draft.puts_space

    def _encode(self) -> None:
        """Encode the text after the last tokens that stay."""
        draft = self._translation.draft
        if not self._data:
            self.is_complete = True
            return
        kept = self._num_kept()
        if self._has_space:
            del self._data[: self._data.startswith(b" ")]  # the target's tokenizer has put it there
            self._has_space = False
        begin, stop = self._ends[kept - 1] if kept else 0, num_whole(self._data)
        piece = bytes(self._data[begin:stop])
        if not kept and self._puts_space and stop:
            begin, piece = begin - 1, b" " + piece
        ids, first = draft.encode(piece), self._start + kept
        old = self.ids[first:]
        del self.ids[first:]
        if ids is None:  # the tokenizer changes the text, or it is none: from here on by parts
            text = self._data[max(begin, 0) : stop].decode("utf-8", "replace")
            self.ids += draft.tokenizer.encode_plain(text)
            self._restart(bytes(self._data[stop:]))
            stop = 0
        else:
            self.ids += ids
            self._ends[kept:] = [*accumulate(map(len, map(draft.of, ids)), initial=begin)][1:]
        rest = draft.spell(bytes(self._data[stop:]))
        self.is_complete = rest is not None
        if rest:
            self.ids += rest
            self._ends += range(stop + 1, stop + len(rest) + 1)
        self.num_stable = min(self.num_stable, first + num_common(old, self.ids[first:]))

    def _num_kept(self) -> int:
        """Return how many tokens after ``_start`` stay: the next one begins a word, if possible, or a character."""
        last = len(self._ends) - WINDOW
        for at in range(last, max(last - WINDOW, 0), -1):
            if self._data[self._ends[at - 1] : self._ends[at - 1] + 1].isspace():
                return at
        for at in range(last, 0, -1):  # the end of the text is no place to start from
            if self._ends[at - 1] < len(self._data) and not is_continuation(self._data[self._ends[at - 1]]):
                return at
        return 0
