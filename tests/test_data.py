"""Training data: what counts in the loss, what a folder holds, how the stream is cut, what each rank reads."""

import itertools
import json

import numpy as np
import pytest
import tokenizers
import torch

from conftest import add_tokenizer, refused
from draftwing.errors import ConfigError, DataError, TokenizerError
from draftwing.text.tokenizer import Tokenizer
from draftwing.train import data as data_module
from draftwing.train.data import (
    FIXED_SETTINGS,
    JOIN,
    Batches,
    Corpus,
    DialogueEncoder,
    Example,
    coverage_of,
    draft_vocabulary,
    read_examples,
    split,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
# As reasoning models do: the thinking of earlier turns is taken out.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ messages | length }} messages\n{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
# Which show content in parts alone.
CONTENT = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
PARTS, MARKED_PARTS = (template.replace("{{ m.content }}", CONTENT) for template in (CHATML, MARKED))
HOPELESS = "{{ messages | length }} messages: {% for m in messages %}{{ m.content }}{% endfor %}"
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('the user must begin') }}{% endif %}" + CHATML

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "add rows"},
    {"role": "assistant", "content": "<think>so</think>for row in rows:\n    add(row)"},
    {"role": "user", "content": "and 😀?"},
    {"role": "assistant", "content": "<think>hm</think>return 😀  \u00e9"},
]


@pytest.fixture
def tokenizer_with(tmp_path):
    """``tokenizer_with(template)``: BOS in front, trimmed offsets as GPT-2's and Llama 3's, two special tokens."""

    def make(template=None, **settings):
        folder = tmp_path / "tokenizer"
        folder.mkdir(exist_ok=True)
        add_tokenizer(folder, **({"chat_template": template} if template else {}), **settings)
        fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        fast.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        trim = tokenizers.processors.ByteLevel(trim_offsets=True)
        fast.post_processor = tokenizers.processors.Sequence([trim, fast.post_processor])
        fast.enable_truncation(50)  # which some files ask for, and which must not cut a document
        fast.save(str(folder / "tokenizer.json"))
        return Tokenizer(folder)

    return make


@pytest.fixture
def write(tmp_path):
    """``write(name, content)``: a file with a text, bytes, or one JSON object per line."""

    def make(name, content):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(entry) + "\n" for entry in content)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return make


def spoken(example, tokenizer):
    """The texts of the runs of tokens that count."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.mask.astype(int), [0]])))
    runs = [example.ids[start:end].tolist() for start, end in edges.reshape(-1, 2)]
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def text_of(ids, tokenizer):
    return tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)


# --- what counts -----------------------------------------------------------------------------------------------------


def only(corpus):
    assert len(corpus.examples) == 1
    return corpus.examples[0]


ANSWERS = [TWO_TURNS[2]["content"], TWO_TURNS[4]["content"]]
ENDED = [answer + "<|im_end|>" for answer in ANSWERS]
OPENED = [{"role": "assistant", "content": "Hello!"}, *TWO_TURNS[1:]]  # which answers nothing
CUT_OFF = [{**message, "finish_reason": "length"} if i == 2 else message for i, message in enumerate(TWO_TURNS)]
CUT_OFF_IN_BLANKS = [
    {**message, "content": message["content"] + "\n  "} if i == 2 else message for i, message in enumerate(CUT_OFF)
]
TRIMMED = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
# "Bot: " ends with the space that begins the token " row": the model was given half of it.
OVER_THE_EDGE = (
    "{% for m in messages %}{{ {'user': 'Q: ', 'assistant': 'Bot: '}[m.role] }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Bot: {% endif %}"
)
MARKED_FROM_THE_START = (
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}!{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, TWO_TURNS, ENDED),
        (INST, TWO_TURNS, [f" {answer} </s>" for answer in ANSWERS]),
        (THINKING, TWO_TURNS, ENDED[1:]),
        (MARKED, TWO_TURNS, ENDED),
        (None, TWO_TURNS, ANSWERS),
        (PARTS, TWO_TURNS, ENDED),
        (MARKED_PARTS, TWO_TURNS, ENDED),
        (CHATML, OPENED, ENDED),
        (None, OPENED, ANSWERS),
        (CHATML, CUT_OFF, [ANSWERS[0], ENDED[1]]),
        (TRIMMED, CUT_OFF_IN_BLANKS, [ANSWERS[0], ENDED[1]]),
        (CHATML, [*TWO_TURNS, TWO_TURNS[1]], ENDED),
        (OVER_THE_EDGE, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "row a"}], [" a\n"]),
    ],
    ids=[
        "chatml", "inst", "thinking-stripped", "generation-marks", "no-template", "parts", "marked-parts",
        "opened-by-the-assistant", "opened-without-a-template", "cut-off", "cut-off-in-blanks",
        "turns-after-the-last-answer", "over-the-edge",
    ],
)  # fmt: skip
def test_exactly_what_the_assistant_writes_counts(template, messages, expected, tokenizer_with, write):
    tokenizer = tokenizer_with(template)
    example = only(read_examples([write("a.jsonl", [{"messages": messages}])], tokenizer, max_length=500))
    assert spoken(example, tokenizer) == expected
    assert (example.ids.dtype, example.mask.dtype) == (np.int32, bool)
    text = text_of(example.ids, tokenizer)
    if template in (CHATML, INST, PARTS) and messages is TWO_TURNS:
        prompt = tokenizer.encode_chat(TWO_TURNS[:4])  # (cut by this file's truncation)
        assert example.ids[: len(prompt)].tolist() == prompt
    elif template is None:  # BOS, and no roles
        assert text == "<s>" + "\n\n".join(message["content"] for message in messages)
    elif template is CHATML:
        assert text.endswith(ANSWERS[1] + "<|im_end|>\n")
    elif template is OVER_THE_EDGE:
        assert " row" in [text_of([token], tokenizer) for token in example.ids]


@pytest.mark.parametrize(("template", "expected"), [(None, ANSWERS[:1]), (CHATML, ENDED[:1]), (HOPELESS, [])])
def test_earlier_answers_in_a_prompt_count_too(template, expected, tokenizer_with):
    """Each prompt ends where the next answer begins."""
    tokenizer, messages = tokenizer_with(template), TWO_TURNS[:4]
    if template is None:
        ids = tokenizer.encode("".join(message["content"] + JOIN for message in messages))
    else:
        ids = tokenizer.encode_chat(messages, **FIXED_SETTINGS)
    encoder = DialogueEncoder(tokenizer, 1000)
    mask = encoder.mask_of_prompt(messages, ids)
    assert spoken(Example(np.asarray(ids), mask), tokenizer) == expected
    assert not encoder.mask_of_prompt(messages, [*ids, 5]).any()  # not what the template makes of these messages


def test_the_first_token_never_counts(tokenizer_with, write):
    tokenizer = tokenizer_with(MARKED_FROM_THE_START)
    example = only(read_examples([write("a.jsonl", [{"messages": TWO_TURNS}])], tokenizer, max_length=500))
    assert example.mask[1:].all()
    assert not example.mask[0]


def test_a_template_that_prints_the_date_prints_the_same_every_day(tokenizer_with, write):
    # Llama 3's way.
    date = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    tokenizer = tokenizer_with(date + "Today is {{ date_string }}." + CHATML)
    example = only(read_examples([write("a.jsonl", [{"messages": TWO_TURNS}])], tokenizer, max_length=500))
    assert text_of(example.ids, tokenizer).startswith("Today is 26 Jul 2024.<|im_start|>")


@pytest.mark.parametrize(
    "entry",
    [
        {"id": 1, "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "add"}]},
        {"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "add"}]},
        {"messages": [{"role": "USER", "content": "hi"}, {"role": "assistant", "content": "add"}]},
        {"prompt": "hi", "response": "add"},
        {"prompt": "hi", "completion": "add"},
        {"question": "hi", "answer": "add"},
        {"instruction": "hi", "input": "", "output": "add"},
        {"instruction": "hi", "input": "x", "output": "add"},
        {"turns": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "add"}]},
        {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "add"}]},
    ],
)
def test_the_shapes_of_a_dialogue(entry, tokenizer_with, write):
    tokenizer = tokenizer_with(CHATML)
    example = only(read_examples([write("a.jsonl", [entry])], tokenizer, max_length=99))
    question = "hi\n\nx" if entry.get("input") else "hi"  # an instruction has its input below it
    expected = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\nadd<|im_end|>\n"
    assert text_of(example.ids, tokenizer) == expected
    assert spoken(example, tokenizer) == ["add<|im_end|>"]
    listed = read_examples([write("dump.json", json.dumps([entry, entry]))], tokenizer, max_length=99)
    assert [one.ids.tolist() for one in listed.examples] == [example.ids.tolist()] * 2


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x1c", "\x0b"])
def test_only_a_newline_ends_a_line(end, tokenizer_with, write):
    """JSON lets all of them stand in a string, and ``str.splitlines`` cuts at every one."""
    tokenizer = tokenizer_with()
    line = json.dumps({"text": f"add{end}row"}, ensure_ascii=False) + "\n"
    corpus = read_examples([write("a.jsonl", line + line)], tokenizer, max_length=50)
    assert text_of(corpus.stream, tokenizer) == f"add{end}row</s>" * 2


def test_long_dialogues_are_cut_and_skipped_only_where_nothing_is_left(tokenizer_with, write):
    tokenizer = tokenizer_with(CHATML)
    long = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 40}]
    files = [
        write("a.jsonl", [{"messages": TWO_TURNS}, {"messages": long}, {"messages": long[:1]}, {"messages": []}]),
        write("b.jsonl", [{"messages": long[:1]}, {"text": " \n"}]),
    ]
    whole = read_examples(files, tokenizer, max_length=500)
    assert dict(whole.skipped) == {"no assistant turn": 3, "no text": 1}
    first = int(np.flatnonzero(whole.examples[0].mask)[0])
    cut = read_examples(files, tokenizer, max_length=first + 2)
    assert dict(cut.skipped) == {"no assistant turn": 3, "no text": 1, "no room for an answer": 1}
    assert cut.examples[0].ids.tolist() == whole.examples[0].ids[: first + 2].tolist()
    assert cut.examples[0].mask.sum() == 2


def test_a_refused_dialogue_is_skipped(tokenizer_with, write):
    tokenizer = tokenizer_with(STRICT)
    corpus = read_examples(
        [write("a.jsonl", [{"messages": TWO_TURNS}, {"messages": TWO_TURNS[1:]}])], tokenizer, max_length=99
    )
    assert len(corpus.examples) == 1
    assert dict(corpus.skipped) == {"refused by the chat template": 1}


# --- documents -------------------------------------------------------------------------------------------------------

DOCUMENTS = ["def add(a, b):\n    return a\n", "for row in rows: print(row)\n", "   \nclass Table:\r\n    x = 1"]


def test_documents_become_one_stream(tokenizer_with, write):
    tokenizer = tokenizer_with()
    lines = [{"text": DOCUMENTS[0]}, {"text": DOCUMENTS[1], "finish_reason": "length"}]
    corpus = read_examples([write("a.jsonl", lines), write("b.txt", DOCUMENTS[2])], tokenizer, max_length=20)
    third = DOCUMENTS[2].replace("\r\n", "\n")
    assert text_of(corpus.stream, tokenizer) == f"{DOCUMENTS[0]}</s>{DOCUMENTS[1]}{third}</s>"  # the second was cut off
    assert corpus.stream.dtype == np.int32
    assert corpus.prefix == (1,)
    starts = [text_of(corpus.stream[start : start + 2], tokenizer) for start in corpus.starts]
    assert [DOCUMENTS[i].startswith(start) for i, start in enumerate(starts)] == [True] * 3
    assert corpus.examples == ()


def test_the_end_token(tokenizer_with, write):
    file = write("a.txt", "add")
    tokenizer = tokenizer_with()
    assert read_examples([file], tokenizer, max_length=20).stream[-1] == 2
    tokenizer = tokenizer_with(eos_token={"content": "<pad>"})
    assert read_examples([file], tokenizer, max_length=20).stream[-1] == 0
    tokenizer = tokenizer_with(eos_token=None)
    with refused(TokenizerError, "the end token", "is unknown", "add one"):
        read_examples([file], tokenizer, max_length=20)
    (tokenizer.folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_examples([file], tokenizer, max_length=20).stream[-1] == 5


def test_long_documents_are_encoded_in_pieces_and_lose_nothing(tokenizer_with, write, monkeypatch):
    monkeypatch.setattr(data_module, "PIECE_CHARACTERS", 16)
    monkeypatch.setattr(data_module, "CHUNK_CHARACTERS", 40)
    text = "for row in rows:\n    add(row)\n" * 9 + "x" * 50
    tokenizer = tokenizer_with()
    corpus = read_examples([write("a.txt", text), write("b.txt", text)], tokenizer, max_length=20)
    assert text_of(corpus.stream, tokenizer) == f"{text}</s>" * 2
    assert corpus.starts.tolist() == [0, len(corpus.stream) // 2]


def test_what_a_folder_holds(tokenizer_with, write, tmp_path):
    for name in ("b.py", "a/z.md", "a/b/c.txt"):
        write(f"data/{name}", f"({name})")
    write("data/d.jsonl", [{"text": "(from jsonl)"}])
    write("data/e.json", json.dumps([{"text": "(from json)"}]))
    write("data/settings.json", '{"text": "(settings)"}')
    write("data/list.json", "[1, 2]")
    for name in (".hidden.py", ".git/x.py", "__pycache__/x.py", "lib/site-packages/x.py"):
        write(f"data/{name}", "(hidden)")
    write("data/latin.txt", "\u00e9".encode("latin-1"))
    write("data/zeros.bin", b"ab\0cd")
    write("data/empty.py", "")
    tokenizer, seen = tokenizer_with(), []
    corpus = read_examples([tmp_path / "data"], tokenizer, max_length=20, on_progress=lambda *at: seen.append(at))
    assert text_of(corpus.stream, tokenizer).split("</s>") == [
        "(a/b/c.txt)", "(a/z.md)", "(b.py)", "(from jsonl)", "(from json)", "[1, 2]", '{"text": "(settings)"}', ""
    ]  # fmt: skip
    total = seen[-1][1]
    assert seen[-1] == (total, total)
    assert all(before <= after for (before, _), (after, _) in itertools.pairwise(seen))


# --- holding out -----------------------------------------------------------------------------------------------------


def example(*ids):
    return Example(np.asarray(ids, dtype=np.int32), np.arange(len(ids)) > 0)


def corpus_of(documents, examples=()):
    lengths = [len(document) for document in documents]
    stream = np.concatenate(documents).astype(np.int32) if documents else np.empty(0, dtype=np.int32)
    return Corpus(tuple(examples), stream, np.cumsum([0, *lengths[:-1]]) if documents else np.empty(0, dtype=int), (1,))


def contents(corpus):
    bounds = [*corpus.starts.tolist(), len(corpus.stream)]
    documents = [tuple(corpus.stream[a:b].tolist()) for a, b in itertools.pairwise(bounds)]
    return sorted(documents), sorted(tuple(one.ids.tolist()) for one in corpus.examples)


def test_split_is_by_content():
    documents = [np.asarray([i, i + 1, 2]) for i in range(300)]
    examples = [example(1, i, 5) for i in range(300)]
    training, validation = split(corpus_of(documents + documents[:40], examples + examples[:40]), 0.2, seed=3)
    assert contents(training) != contents(validation)
    for kept, held in zip(contents(training), contents(validation), strict=True):
        assert len(kept) + len(held) == 340
        assert not set(kept) & set(held)
        assert 0.13 < len(set(held)) / 300 < 0.27
    again = split(corpus_of(documents[::-1] + documents[:40], examples[::-1] + examples[:40]), 0.2, seed=3)
    assert [contents(side) for side in again] == [contents(training), contents(validation)]
    other = split(corpus_of(documents, examples), 0.2, seed=4)
    assert set(contents(other[1])[1]) != set(contents(validation)[1])


def test_split_of_little():
    for num in range(2, 12):
        corpus = corpus_of([], [example(1, i) for i in range(num)])
        for share in (0.01, 0.99):
            training, validation = split(corpus, share, 0)
            assert training.examples
            assert validation.examples
    one_file = corpus_of([np.arange(60_000) % 50_000])  # sections of one long document
    training, validation = split(one_file, 0.1, 0)
    assert len(training.stream) + len(validation.stream) == 60_000
    assert len(validation.stream) in (16384, 60_000 - 3 * 16384)
    whole, nothing = split(corpus, 0, 0)
    assert whole is corpus
    assert nothing.num_tokens == 0


def test_split_refuses():
    with refused(DataError, "all dialogues and sections of text (2) are the same", "share 0"):
        split(corpus_of([], [example(1, 2)] * 2), 0.1, 0)
    with refused(ConfigError, "validation_share must be in [0, 1), found 1"):
        split(corpus_of([], [example(1, 2)] * 2), 1, 0)


# --- batches ---------------------------------------------------------------------------------------------------------


def rows_of(batch):
    rows = []
    for ids, mask, length in zip(batch.ids, batch.mask, batch.lengths.tolist(), strict=True):
        assert not ids[length:].any()
        assert not mask[length:].any()
        assert not mask[0]
        rows.append((tuple(ids[:length].tolist()), tuple(mask[:length].tolist())))
    return rows


def epoch(batches, number):
    num = batches.num_batches_per_epoch
    return [row for i in range(num) for row in rows_of(batches.batch(number * num + i))]


def mixed(seed=0):
    rng = np.random.default_rng(seed)
    examples = [example(1, *rng.integers(3, 90, rng.integers(1, 60))) for _ in range(200)]
    return corpus_of([np.arange(100 + i, 137 + i) for i in range(40)], examples)


def test_every_epoch_has_every_token_once_and_another_order():
    corpus = mixed()
    batches = Batches(corpus, 300, 50, seed=1)
    dialogues = sorted((tuple(one.ids[:50].tolist()), tuple(one.mask[:50].tolist())) for one in corpus.examples)
    seen = []
    for number in range(3):
        rows = epoch(batches, number)
        windows = [row for row in rows if row[0][0] == 1 and row[0][-1] >= 100]
        assert sorted(row for row in rows if row not in windows) == dialogues
        tokens = np.concatenate([ids[1:] for ids, _ in windows])
        assert np.array_equal(np.sort(tokens), np.sort(corpus.stream))
        assert all(len(ids) == 50 for ids, _ in windows[:-1]) or sorted(len(ids) for ids, _ in windows)[1] == 50
        assert all(all(mask[1:]) for _, mask in windows)
        assert sum(len(ids) for ids, _ in rows) == batches.num_tokens_per_epoch
        seen.append(({ids for ids, _ in windows}, [row for row in rows if row not in windows]))
    assert len(seen[0][0] & seen[1][0]) == 0  # cut elsewhere
    assert seen[0][1] != seen[1][1]
    num = batches.num_batches_per_epoch
    together = [{frozenset(rows_of(batches.batch(n * num + i))) for i in range(num)} for n in range(2)]
    assert len(together[0] & together[1]) < 0.1 * num  # other companions


def test_windows_follow_the_stream():
    stream = np.arange(3, 1003)
    batches = Batches(corpus_of([stream]), 500, 65, seed=0)
    assert batches.num_batches_per_epoch == 3  # 16 windows of 64, seven in a batch
    for ids, _ in epoch(batches, 4):
        assert ids[0] == 1
        assert all(after == before + 1 or (before, after) == (1002, 3) for before, after in itertools.pairwise(ids[1:]))


def test_no_token_of_a_prefix_counts():
    corpus = Corpus(stream=np.arange(10, 30, dtype=np.int32), starts=np.array([0]), prefix=(1, 2, 3))
    rows = list(epoch(Batches(corpus, 16, 8, seed=0), 4))
    assert rows
    for ids, mask in rows:
        assert list(ids[:3]) == [1, 2, 3]
        assert [bool(counts) for counts in mask] == [False] * 3 + [True] * (len(ids) - 3)


def test_dialogues_that_are_answered_behind_the_limit_make_no_row():
    late, early = (Example(np.arange(10, dtype=np.int32), np.arange(10) == place) for place in (5, 4))
    assert Batches(Corpus((late, early)), 40, 5).lengths.tolist() == [5]


def test_without_bos_windows_are_stream_alone():
    batches = Batches(Corpus(stream=np.arange(3, 103, dtype=np.int32), starts=np.asarray([0])), 40, 20, seed=0)
    assert sorted(token for ids, _ in epoch(batches, 0) for token in ids) == list(range(3, 103))
    assert all(mask == (False,) + (True,) * 19 for _, mask in epoch(batches, 0))


def test_a_batch_is_a_function_of_seed_and_number():
    corpus = mixed()
    batches = Batches(corpus, 300, 50, seed=1)
    numbers = list(range(0, 3 * batches.num_batches_per_epoch, 7))
    forward = [rows_of(batches.batch(number)) for number in numbers]
    resumed = Batches(mixed(), 300, 50, seed=1)
    assert [rows_of(resumed.batch(number)) for number in reversed(numbers)] == forward[::-1]
    assert rows_of(Batches(corpus, 300, 50, seed=2).batch(0)) != forward[0]


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_ranks_share_a_batch(world_size):
    batches = Batches(mixed(), 300, 50, seed=1)
    for number in range(batches.num_batches_per_epoch):
        parts = [batches.batch(number, rank, world_size) for rank in range(world_size)]
        assert max(len(part.ids) for part in parts) - min(len(part.ids) for part in parts) <= 1
        together = sorted(row for part in parts for row in rows_of(part))
        assert together == sorted(rows_of(batches.batch(number)))


def test_batches_are_full_and_little_padded():
    batches = Batches(mixed(), 600, 50, seed=1)
    sizes = [batches.batch(i).ids.numel() for i in range(batches.num_batches_per_epoch)]
    assert max(sizes) <= 600
    assert sorted(sizes)[1] > 450  # all but the one with the last rows
    assert batches.num_tokens_per_epoch / sum(sizes) > 0.85


def test_batches_refuse():
    rows = Corpus((example(1, *range(3, 40)),))
    with refused(ConfigError, "tokens_per_batch is 20, and the longest row has 38 tokens", "raise it to at least 38"):
        Batches(rows, 20, 50, 0)
    with refused(DataError, "nothing to train on"):
        Batches(Corpus(), 20, 50, 0)
    with refused(ConfigError, "max_length must be at least 2, found 1"):
        Batches(corpus_of([np.arange(9)]), 20, 1, 0)
    with refused(ConfigError, "room for 1 of the longest rows, and there are 2 ranks: raise tokens_per_batch to 76"):
        Batches(rows, 50, 50, 0).batch(0, 1, 2)
    with refused(ConfigError, "seed must be at least 0, found -1"):
        Batches(rows, 50, 50, -1)


# --- draft vocabulary ------------------------------------------------------------------------------------------------


def test_draft_vocabulary():
    mask = np.asarray([False, True, True, True, True, True, True, False])
    dialogue = Example(np.asarray([9, 4, 4, 7, 7, 3, 8, 9], dtype=np.int32), mask)
    corpus = corpus_of([np.asarray([4, 2])], [dialogue])
    ids = draft_vocabulary(corpus, 12, 4, always=[11])
    assert ids.tolist() == [2, 4, 7, 11]  # 2, 3 and 8 are as frequent, and 2 is the lowest
    assert ids.dtype == torch.int64
    assert coverage_of(corpus, ids, 12) == pytest.approx(6 / 8)
    whole = draft_vocabulary(corpus, 12, 20)
    assert whole.tolist() == list(range(12))
    assert coverage_of(corpus, whole, 12) == coverage_of(corpus, None, 12) == 1


def test_draft_vocabulary_refuses():
    with refused(DataError, "token id 7, and the vocabulary has 5", "own tokenizer"):
        draft_vocabulary(Corpus((example(1, 7),)), 5, 2)
    with refused(ConfigError, "draft_vocab_size must be at least 2 (2 ids are always in), found 1"):
        draft_vocabulary(Corpus((example(1, 7),)), 9, 1, always=[2, 3])
    with refused(ConfigError, "outside the vocabulary of 9: [2, 9]"):
        draft_vocabulary(Corpus((example(1, 7),)), 9, 3, always=[2, 9])
    with refused(DataError, "no token that counts"):
        draft_vocabulary(Corpus(), 9, 3)


# --- what is wrong, and the mend -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.jsonl", "", ["a.jsonl: this file is empty"]),
        ("a.jsonl", '{"text": "x"}\n\n{"text"\n', ["a.jsonl, line 3: not JSON", "fix or delete the line"]),
        ("a.jsonl", b'{"text": "\xff"}\n', ["a.jsonl, line 1: not JSON", "utf-8"]),
        ("a.jsonl", "[1]\n", ["a.jsonl, line 1: expected an object with 'conversations'", "found [1]"]),
        (
            "a.jsonl",
            [{"query": "x", "reply": "y"}],
            ["line 1: expected one of", "'question' (with 'answer')", "found 'query', 'reply': rename"],
        ),
        ("a.jsonl", [{"text": 3}], ["line 1: expected a string under 'text', found int 3", "delete the entry"]),
        ("a.jsonl", [{"prompt": "x", "response": None}], ["expected a string under 'response', found NoneType"]),
        ("a.jsonl", [{"messages": "x"}], ["line 1, 'messages': expected a list of messages, found str"]),
        ("a.jsonl", [{"messages": ["x"]}], ["line 1, 'messages', message 1: expected an object, found 'x'"]),
        (
            "a.jsonl",
            [{"messages": [{"role": "user"}]}],
            ["message 1: expected a string under 'content'", "no such key"],
        ),
        (
            "a.jsonl",
            [{"conversations": [{"from": "human", "value": ["x"]}]}],
            ["'conversations', message 1: expected a string under 'value', found list"],
        ),
        (
            "a.jsonl",
            [{"conversations": [{"from": "alien", "value": "x"}]}],
            ["message 1: unknown role 'alien': rename it to one of assistant, system, tool, user"],
        ),
        ("a.jsonl", [{"prompt": "x"}], ["nothing is left to train on (1 with no assistant turn)", "data regenerate"]),
        ("a.jsonl", [{"text": "  "}], ["nothing is left to train on (1 with no text)", "larger max_length"]),
        ("a.jsonl", "[" * 100_000, ["a.jsonl, line 1: not JSON", "nested too deep"]),
        ("a.jsonl", [{"turns": [3]}], ["line 1, 'turns', message 1: expected an object, found 3"]),
        ("a.jsonl", [{"instruction": "x", "input": 3}], ["expected a string under 'input', found int 3"]),
        ("a.json", "[" * 100_000, ["a.json: not JSON", "nested too deep"]),
        ("a.json", "[1", ["a.json: not JSON", "name the file .jsonl"]),
        ("a.json", '{"a": 1}', ["a.json: expected a list of objects with 'conversations'", "found {'a': 1}"]),
        ("a.txt", b"\xe9\xe8", ["a.txt: expected UTF-8 text, found other bytes", "convert"]),
        ("a.txt", b"a\0b", ["a.txt: expected UTF-8 text", "zero bytes"]),
        ("data/.hidden", "x", ["data: this folder has no file to read"]),
    ],
)
def test_bad_sources(name, content, parts, tokenizer_with, write):
    file = write(name, content)
    with refused(DataError, *parts):
        read_examples([file.parent if name.startswith("data/") else file], tokenizer_with(CHATML), max_length=50)


def test_bad_calls(tokenizer_with, write, tmp_path):
    tokenizer = tokenizer_with()
    with refused(DataError, "no source of data: give at least one"):
        read_examples([], tokenizer, max_length=50)
    with refused(DataError, "nowhere.txt: there is no such file or folder: check the path"):
        read_examples([tmp_path / "nowhere.txt"], tokenizer, max_length=50)
    with refused(ConfigError, "max_length must be at least 2", "found 1"):
        read_examples([write("a.txt", "x")], tokenizer, max_length=1)


def test_templates_that_will_not_do(tokenizer_with, write):
    file = write("a.jsonl", [{"messages": TWO_TURNS}])
    with refused(TokenizerError, "tokenizer: the chat template does not show", "{% generation %}", "put these marks"):
        read_examples([file], tokenizer_with(HOPELESS), max_length=50)
    with refused(TokenizerError, "tokenizer: the chat template refuses", "the user must begin", "take turns"):
        read_examples([file], tokenizer_with(STRICT), max_length=50)


def test_half_a_surrogate_pair_is_no_text(tokenizer_with, write):
    file = write("a.jsonl", '{"text": "a\\ud83d"}\n')
    tokenizer = tokenizer_with()
    assert text_of(read_examples([file], tokenizer, max_length=50).stream, tokenizer) == "a?</s>"
