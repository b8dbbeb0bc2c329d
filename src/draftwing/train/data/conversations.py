"""Dialogues as token ids, and which of them the assistant wrote.

A chat template is a program, so where an assistant's turn stands in its output is found by running it: the dialogue
up to before the turn, ready for the assistant, and the dialogue up to and including the turn must both be beginnings
of the whole text, and what lies between them is the turn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from tokenizers import Encoding, processors
from tokenizers import Tokenizer as FastTokenizer

from draftwing.errors import TokenizerError
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data.sources import Message, Record

__all__ = ["DialogueEncoder", "Span", "bare_tokenizer", "special_prefix"]

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
