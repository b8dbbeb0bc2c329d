"""Prompts and files of them; the stream of text: whole characters, no stop string overshot, however ids are grouped."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from conftest import refused
from draftwing.errors import CheckpointError, ConfigError, DraftwingError, PromptError
from draftwing.text.prompts import as_list, check_prompt, read_prompts
from draftwing.text.tokenizer import TextStream

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on. \U0001f600\U0001f680",
    "def area(width: int, height: int) -> int:\n    return width * height\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01 \u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002 Hello, world! <|end|> stop here",
    "caf\u00e9 na\u00efve \U0001f468\u200d\U0001f469\u200d\U0001f467 \u3053\u3093\u306b\u3061\u306f STOP STO ST",
]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    """Words that bring their space along, the first one dropped, and byte tokens for everything else."""
    words = ["<unk>", "<s>", "\u2581", "\u2581Hello", "\u2581world", "wide", "!", "\u2581\u2581"]
    vocab = {piece: i for i, piece in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    vocab = tokenizer.get_vocab()
    return [vocab[f"<0x{byte:02X}>"] for byte in data]


def groups(rng: random.Random, ids: Sequence[int]) -> list[list[int]]:
    out: list[list[int]] = []
    at = 0
    while at < len(ids):
        size = rng.randint(0, 6)
        out.append(list(ids[at : at + size]))
        at += size
    return out


def run(stream: TextStream, pushes: Sequence[Sequence[int]]) -> tuple[str, str | None, int]:
    text = "".join([stream.push(ids) for ids in pushes]) + stream.flush()
    return text, stream.stopped, stream.num_tokens_kept


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule, a character at a time: the longest stop string that the text so far ends with."""
    for end in range(1, len(text) + 1):
        hits = [item for item in stop if text[:end].endswith(item)]
        if hits:
            hit = max(hits, key=len)
            return text[: end - len(hit)], hit
    return text, None


@pytest.mark.parametrize("line", LINES)
def test_groupings_and_characters(bpe: Tokenizer, line: str) -> None:
    ids = ids_of(bpe, line)
    rng = random.Random(1)
    prompt = ids_of(bpe, "Say: ")
    for _ in range(10):
        assert run(TextStream(bpe, prompt), groups(rng, ids)) == (line, None, len(ids))
    stream = TextStream(bpe, prompt)
    shown = ""
    for token in ids:
        shown += stream.push([token])
        assert line.startswith(shown)
    assert shown + stream.flush() == line


def test_random_ids_give_the_whole_decode(bpe: Tokenizer) -> None:
    # Mostly bytes that are no characters, special tokens among them, and prompts that start anywhere.
    rng = random.Random(2)
    for _ in range(60):
        prompt = ids_of(bpe, rng.choice(LINES)) if rng.random() < 0.8 else []
        prompt = prompt[rng.randint(0, len(prompt)) :]
        ids = [rng.randrange(bpe.get_vocab_size()) for _ in range(rng.randint(1, 120))]
        text, _, _ = run(TextStream(bpe, prompt), groups(rng, ids))
        whole = bpe.decode(prompt + ids, skip_special_tokens=True)
        assert text == whole[len(bpe.decode(prompt, skip_special_tokens=True)) :]


def test_random_stops(bpe: Tokenizer) -> None:
    rng = random.Random(3)
    whole = " ".join(LINES)
    ids = ids_of(bpe, whole)
    for _ in range(150):
        starts = [rng.randrange(len(whole) - 8) for _ in range(rng.randint(1, 4))]
        stop = tuple(whole[at : at + rng.randint(1, 8)] + rng.choice(["", "", "q"]) for at in starts)
        text, hit = first_stop(whole, stop)
        found = run(TextStream(bpe, ids[:5], stop), groups(rng, ids))
        assert found == run(TextStream(bpe, ids[:5], stop), [[token] for token in ids])
        assert found[:2] == (text, hit)
        if hit is None:
            assert found[2] == len(ids)
        else:
            # The kept ids are the fewest whose text has the stop string.
            assert bpe.decode(ids[: found[2]]).startswith(text + hit)
            assert not bpe.decode(ids[: found[2] - 1]).startswith(text + hit)


def test_never_past_a_stop_or_half_a_character(bpe: Tokenizer) -> None:
    whole = LINES[2]
    ids = ids_of(bpe, whole)
    stream = TextStream(bpe, stop=("<|end|>",))
    shown = ""
    for token in ids:
        shown += stream.push([token])
        assert "\ufffd" not in shown
        assert "<" not in shown
    assert shown == whole[: whole.index("<|end|>")]
    assert stream.stopped == "<|end|>"
    assert stream.flush() == ""


class Pieces:
    """A tokenizer whose ids stand for given bytes, so that one token can end a character and start the next."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return b"".join([self.pieces[i] for i in ids]).decode("utf-8", "replace")


def test_stop_in_front_of_half_a_character() -> None:
    # The token that completes the stop string counts, although it also holds the start of a character.
    stream = TextStream(Pieces([b"a", b"!\xe2", b"\x82\xac"]), stop=("!",))
    assert stream.push([0, 1, 2]) == "a"
    assert (stream.stopped, stream.num_tokens_kept) == ("!", 2)


def test_tokens_across_characters() -> None:
    rng = random.Random(5)
    whole = "".join(LINES) + "\u4f60\u597d" * 40
    for _ in range(30):
        data, cuts = whole.encode(), [0]
        while cuts[-1] < len(data):
            cuts.append(cuts[-1] + rng.randint(1, 5))
        pieces = [data[a:b] for a, b in pairwise(cuts)]
        start = rng.randrange(8)
        ids = list(range(start, len(pieces)))
        prompt = list(range(start))
        expected = whole[len(Pieces(pieces).decode(prompt, skip_special_tokens=True).rstrip("\ufffd")) :]
        assert run(TextStream(Pieces(pieces), prompt), groups(rng, ids))[0] == expected
    # Every token ends inside a character, for much longer than any character is; all but that one comes out at once.
    data = whole[-80:].encode()
    pieces = [data[:1]] + [data[at : at + 3] for at in range(1, len(data), 3)]
    stream = TextStream(Pieces(pieces))
    for i in range(len(pieces) - 1):
        assert stream.push([i]) == whole[-81 + i : -80 + i] * (i > 0)
    assert stream.push([len(pieces) - 1]) == whole[-1]


@pytest.mark.parametrize(
    ("prompt", "text", "stop", "found"),
    [
        ("", "go STOPPED", ("STOP", "STOPPED"), ("go ", "STOP")),
        ("", "go STOPPED", ("STOPPED", "STOP"), ("go ", "STOP")),
        ("", "go STOPPED", ("OP", "STOP"), ("go ", "STOP")),  # the longer of two that end together
        ("", "aaaab!", ("aab",), ("aa", "aab")),  # after a false start the search continues in the text held back
        ("never STOP", "PED yet STOP now", ("STOP",), ("PED yet ", "STOP")),  # the prompt is not searched
        ("never STO", "P!", ("STOP",), ("P!", None)),  # nor does a stop string begin in it
    ],
)
def test_one_stop_is_a_prefix_of_another(
    bpe: Tokenizer, prompt: str, text: str, stop: tuple[str, ...], found: tuple[str, str | None]
) -> None:
    pushes = [[token] for token in ids_of(bpe, text)]
    assert run(TextStream(bpe, ids_of(bpe, prompt), stop), pushes)[:2] == found


def test_partial_stop_and_open_character_are_flushed(bpe: Tokenizer) -> None:
    stream = TextStream(bpe, [], ("STOP",))
    assert stream.push(ids_of(bpe, "go STO")) == "go "
    assert stream.flush() == "STO"
    assert stream.flush() == ""
    assert stream.stopped is None
    euro = ids_of(bpe, "\u20ac")
    assert len(euro) > 1
    stream = TextStream(bpe)
    assert stream.push(euro[:-1]) == ""
    assert stream.flush() == "\ufffd"
    with pytest.raises(DraftwingError, match="flush"):
        stream.push(euro)


def test_ids_behind_the_stop_do_not_count(bpe: Tokenizer) -> None:
    ids = ids_of(bpe, "a STOP and more")
    stream = TextStream(bpe, [], ("STOP",))
    assert [stream.push(ids), stream.push(ids), stream.flush()] == ["a ", "", ""]
    kept = bpe.decode(ids[: stream.num_tokens_kept])
    assert kept.startswith("a STOP")
    assert kept != bpe.decode(ids)


def test_prompt_that_ends_inside_a_character(bpe: Tokenizer, llama: Tokenizer) -> None:
    euro = ids_of(bpe, "\u20ac")
    assert run(TextStream(bpe, ids_of(bpe, "now ") + euro[:1]), [euro[1:], ids_of(bpe, "5")])[0] == "\u20ac5"
    euro = byte_ids(llama, "\u20ac".encode())
    rest = byte_ids(llama, "\u4f60\u597d".encode())
    assert run(TextStream(llama, [3, *euro[:1]]), [euro[1:], rest])[0] == "\u20ac\u4f60\u597d"
    # A U+FFFD that the prompt really has is not given out again.
    assert run(TextStream(bpe, ids_of(bpe, "odd \ufffd")), [ids_of(bpe, " one")])[0] == " one"


def test_leading_spaces_and_byte_fallback(llama: Tokenizer) -> None:
    rng = random.Random(4)
    characters = [byte_ids(llama, character.encode()) for character in "\u4f60\U0001f600"]
    pieces = [[3], [4], [5], [6], [2], [7], [1], *characters]
    for _ in range(200):
        prompt = list(chain.from_iterable(rng.choices(pieces, k=rng.randint(0, 30))))
        ids = list(chain.from_iterable(rng.choices(pieces, k=rng.randint(1, 20))))
        whole = llama.decode(prompt + ids, skip_special_tokens=True)
        text, _, kept = run(TextStream(llama, prompt), groups(rng, ids))
        assert text == whole[len(llama.decode(prompt, skip_special_tokens=True)) :]
        assert kept == len(ids)
    assert run(TextStream(llama, [3]), [[4]])[0] == " world"
    assert run(TextStream(llama), [[4]])[0] == "world"
    # Special tokens alone are no context: the space is there because a word stands in front of them.
    assert run(TextStream(llama, [3] + [1] * 40), [[1], [4], [1], [4]])[0] == " world world"


def test_special_tokens_can_be_shown(bpe: Tokenizer) -> None:
    ids = [*ids_of(bpe, "the dog"), bpe.get_vocab()["<eos>"]]
    assert run(TextStream(bpe), [ids])[0] == "the dog"
    assert run(TextStream(bpe, skip_special_tokens=False), [ids])[0] == "the dog<eos>"
    assert run(TextStream(bpe, skip_special_tokens=False, stop=("<eos>",)), [ids])[1] == "<eos>"


class Counting:
    """A tokenizer that counts the ids it is given to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_ids = 0

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        self.num_ids += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["text", "broken", "special"])
def test_work_grows_with_the_length_only(bpe: Tokenizer, kind: str) -> None:
    ids = ids_of(bpe, " ".join(LINES * 12))[:1000]
    if kind == "broken":
        ids = [ids_of(bpe, "\u20ac")[1]] * 1000  # bytes that continue a character that never began
        assert bpe.decode(ids[:20]) == "\ufffd" * 20
    elif kind == "special":
        ids[1:] = [bpe.get_vocab()["<eos>"]] * 999
    counting = Counting(bpe)
    text, _, _ = run(TextStream(counting, ids_of(bpe, "So ")), [[token] for token in ids])
    assert text == bpe.decode(ids)
    assert counting.num_ids < 30 * len(ids)


@pytest.mark.parametrize("stop", ["END", ("a", ""), ("a", 3)])
def test_bad_stop(bpe: Tokenizer, stop: Any) -> None:
    with pytest.raises(ConfigError, match="stop"):
        TextStream(bpe, [], stop)


# --- prompts ---------------------------------------------------------------------------------------------------------

ASKED = [{"role": "user", "content": "hi"}]
RECORDS: list[tuple[dict[str, Any], Any]] = [
    ({"prompt": "hi"}, "hi"),
    ({"prompt": "hi", "completion": "add"}, "hi"),
    ({"prompt": "hi", "response": "add"}, "hi"),
    ({"prompt": ASKED, "completion": [{"role": "assistant", "content": "add"}]}, ASKED),
    ({"text": "hi"}, "hi"),
    ({"messages": ASKED}, ASKED),
    ({"messages": [*ASKED, {"role": "assistant", "content": "add"}]}, ASKED),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "add"}]}, ASKED),
    ({"turns": ["hi", "and then?"]}, ASKED),
    ({"turns": [{"role": "user", "content": "hi"}, {"role": "user", "content": "and then?"}]}, ASKED),
    ({"question": "hi", "answer": "add"}, ASKED),
    ({"question": "hi"}, ASKED),
    ({"instruction": "hi", "input": "", "output": "add"}, ASKED),
    ({"instruction": "hi", "input": "x", "output": "add"}, [{"role": "user", "content": "hi\n\nx"}]),
]


@pytest.mark.parametrize(("record", "prompt"), RECORDS)
def test_prompts_in_every_form_of_the_field(record: dict[str, Any], prompt: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(record) + "\n\n" + json.dumps(record))
    assert read_prompts(file) == [prompt] * 2
    assert read_prompts(file, 1) == [prompt]
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([record] * 3))
    assert read_prompts(file) == [prompt] * 3


def test_a_dialogue_is_asked_up_to_its_last_question(tmp_path: Path) -> None:
    said = [("system", "brief"), ("human", "hi"), ("gpt", "hello"), ("human", "and?"), ("gpt", "x"), ("gpt", "y")]
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"conversations": [{"from": role, "value": text} for role, text in said]}))
    (prompt,) = read_prompts(file)
    roles = ["system", "user", "assistant", "user"]
    expected = [{"role": role, "content": text} for role, (_, text) in zip(roles, said, strict=False)]
    assert prompt == expected
    said = [("human", "rain?"), ("gpt", "I look."), ("tool", "none")]
    file.write_text(json.dumps({"conversations": [{"from": role, "value": text} for role, text in said]}))
    assert [message["content"] for message in read_prompts(file)[0]] == ["rain?", "I look.", "none"]


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x1c"])
def test_only_a_newline_ends_a_prompt(end: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text((json.dumps({"prompt": f"a{end}b"}, ensure_ascii=False) + "\r\n") * 2, encoding="utf-8", newline="")
    assert read_prompts(file) == [f"a{end}b"] * 2


@pytest.mark.parametrize(
    ("name", "content", "kind", "parts"),
    [
        ("a.txt", b"\xff", CheckpointError, ["a.txt: prompts cannot be read", "UTF-8"]),
        ("a.txt", b" \n", PromptError, ["a.txt: there is no prompt in it", "give some text"]),
        ("a.jsonl", b"{", PromptError, ["a.jsonl, line 1: not JSON", "each line must be one object"]),
        ("a.jsonl", b"[" * 100_000, PromptError, ["a.jsonl, line 1: not JSON (it is nested too deep)"]),
        ("a.jsonl", b"[1]", PromptError, ["a.jsonl, line 1: expected an object with 'conversations'", "found [1]"]),
        ("a.jsonl", b'{"messages": ["x"]}', PromptError, ["line 1, 'messages', message 1: expected an object"]),
        ("a.jsonl", b'{"messages": []}', PromptError, ["a.jsonl, line 1: there is no question in this dialogue"]),
        ("a.jsonl", b'{"turns": []}', PromptError, ["a.jsonl, line 1: there is no question in this dialogue"]),
        ("a.jsonl", b'{"prompt": ""}', PromptError, ["a.jsonl, line 1: the prompt is empty"]),
        ("a.jsonl", b'{"prompt": 3}', PromptError, ["line 1: expected a string under 'prompt', found int 3"]),
        ("a.jsonl", b'{"prompt": "\\ud83d"}', PromptError, ["line 1: invalid character U+D83D", "give valid text"]),
        ("a.jsonl", b'{"question": "\\ud83d"}', PromptError, ["line 1: invalid character U+D83D", "give valid text"]),
        ("a.json", b"{}", PromptError, ["a.json: expected a list of objects, found {}"]),
    ],
)
def test_prompt_files_that_will_not_do(
    name: str, content: bytes, kind: type[DraftwingError], parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(kind, *parts):
        read_prompts(tmp_path / name)


def test_stdin_is_read_as_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    for content, prompt in ((b"caf\xc3\xa9", "caf\u00e9"), (b"\xef\xbb\xbfa\r\nb", "a\nb")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))
        assert read_prompts("-") == [prompt]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    with refused(CheckpointError, "stdin: prompts cannot be read", "give a UTF-8 text"):
        read_prompts("-")
    monkeypatch.setattr("sys.stdin", None)
    with refused(PromptError, "there is no prompt"):
        read_prompts("-")


def test_one_prompt_or_many() -> None:
    for one in ("hi", [5, 6], ASKED, b"hi", {"role": "user"}, None, 5, range(3)):
        assert as_list(one) == [list(one) if isinstance(one, range) else one]
    for many in ([], ["hi", "ho"], [[5], "hi"], [ASKED], [[]], ("hi",)):
        assert as_list(many) == list(many)
    assert len(as_list(np.zeros((3, 2), dtype=np.int64))) == 3
    assert len(as_list(np.zeros(3, dtype=np.int64))) == 1
    assert len(as_list(np.asarray(3))) == 1


def test_a_checked_prompt_is_plain() -> None:
    assert check_prompt("hi") == "hi"
    assert check_prompt(np.asarray([5, 6])) == check_prompt((5, 6)) == check_prompt(range(5, 7)) == [5, 6]
    assert all(type(token) is int for token in check_prompt([np.int64(5), 6]))
    messages = [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "user", "content": [{"text": "hi"}]}]
    assert check_prompt(messages) == messages
