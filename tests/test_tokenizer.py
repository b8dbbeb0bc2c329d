"""A folder's tokenizer has the ids of transformers, and never runs the folder's code."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conftest import add_tokenizer, refused
from draftwing.errors import TokenizerError
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import DataRecord, DialogueEncoder

LONG = "import os\n" * 40 + "def last(): # this is cut off"
TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "<pad>",
}  # fmt: skip
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
TOOL = {"content": "<|tool|>", "special": True, **FLAGS}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def change_json(folder: Path, name: str, **changes: Any) -> None:
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | changes))


def theirs(folder: Path, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)(text)["input_ids"]


# --- truncation and padding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"truncation": TRUNCATION}, {"padding": PADDING}], ids=["truncation", "padding"])
@pytest.mark.parametrize("text", ["def add(", LONG])
def test_settings_of_a_training_script(tmp_path, changes, text):
    add_tokenizer(tmp_path, chat_template=TEMPLATE)
    change_json(tmp_path, "tokenizer.json", **changes)
    tokenizer = Tokenizer(tmp_path)
    expected = theirs(tmp_path, text)
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_plain(text) == expected[1:]  # without <s>
    assert tokenizer.encode_chat([{"role": "user", "content": text}]) == expected[1:]
    encoder = DialogueEncoder(tokenizer, 512)
    assert encoder.prefix == (1,)
    assert encoder.bare.encode(text).ids == expected[1:]


def test_padding_that_the_caller_of_a_shared_tokenizer_asked_for(tmp_path):
    """transformers leaves the padding of its last call in the backend."""
    pretrained = AutoTokenizer.from_pretrained(add_tokenizer(tmp_path, pad_token="<pad>"))
    tokenizer = Tokenizer.from_transformers(pretrained)
    expected = tokenizer.encode("def add(")
    pretrained("x", padding="max_length", max_length=30, truncation=True)
    assert tokenizer.encode("def add(") == expected


# --- tokens outside tokenizer.json -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"extra_special_tokens": ["<|tool|>"]},
        {"extra_special_tokens": {"tool_token": "<|tool|>"}},
        {"additional_special_tokens": ["<|tool|>", "<|end|>"]},
        {"additional_special_tokens": [{"__type": "AddedToken", **TOOL}]},
        {"added_tokens_decoder": {"300": TOOL}},
        {"added_tokens_decoder": {"301": TOOL, "300": {**TOOL, "content": "<|end|>"}}},
        {"added_tokens_decoder": {"300": {**TOOL, "special": False, "lstrip": True}}},
        {"added_tokens_decoder": {"300": TOOL}, "extra_special_tokens": ["<|tool|>", "<|end|>"]},
        {"pad_token": "<|end|>", "eos_token": "<|tool|>"},
        {"unk_token": {"__type": "AddedToken", **TOOL, "rstrip": True}},
        {"image_token": "<|tool|>"},
        {"extra_special_tokens": [], "pad_token": None},
        {"split_special_tokens": True, "extra_special_tokens": ["<|tool|>"]},
    ],
)  # fmt: skip
def test_tokens_that_the_config_names(tmp_path, changes):
    add_tokenizer(tmp_path)
    change_json(tmp_path, "tokenizer_config.json", **changes)
    tokenizer = Tokenizer(tmp_path)
    for text in ("a <|tool|> b<|end|>", "<s><|tool|>x</s>", "x<|tool|>"):
        ids = tokenizer.encode(text)
        assert ids == theirs(tmp_path, text)
        assert tokenizer.decode(ids) == AutoTokenizer.from_pretrained(tmp_path).decode(ids, skip_special_tokens=True)


def test_tokens_in_older_files(tmp_path):
    """Both are read only if the config lists no added tokens."""
    add_tokenizer(tmp_path)
    change_json(tmp_path, "added_tokens.json", **{"<|end|>": 301, "<|tool|>": 300})
    change_json(tmp_path, "special_tokens_map.json", pad_token="<|tool|>", additional_special_tokens=["<|more|>"])
    text = "a <|tool|> b<|end|> <|more|>"
    assert Tokenizer(tmp_path).encode(text) == theirs(tmp_path, text)
    change_json(tmp_path, "tokenizer_config.json", added_tokens_decoder={})
    assert Tokenizer(tmp_path).encode(text) == theirs(tmp_path, text)


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens_decoder": ["<|tool|>"]},
        {"added_tokens_decoder": {"x": TOOL}},
        {"added_tokens_decoder": {"300": 5}},
        {"extra_special_tokens": 5},
        {"additional_special_tokens": [5]},
        {"pad_token": ["<pad>"]},
    ],
)
def test_tokens_that_are_none(tmp_path, changes):
    add_tokenizer(tmp_path)
    change_json(tmp_path, "tokenizer_config.json", **changes)
    with refused(TokenizerError, str(tmp_path), "tokenizer"):
        Tokenizer(tmp_path)


# --- chat templates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bos_token": {"__type": "AddedToken", "content": "<pad>", **FLAGS}},
        {"bos_token": None},
        {"added_tokens_decoder": {}},
    ],
    ids=["named", "object", "none", "listed"],
)
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("others", [{}, {"bos_token": "</s>"}, {"unk_token": "</s>"}], ids=str)
def test_a_template_shows_the_tokens_that_transformers_shows(tmp_path, settings, kind, others):
    """Named by the folder, by an older file, or only by the tokenizer's class."""
    template = "{{ bos_token }}|{{ unk_token }}|{{ messages[0].content }}"
    add_tokenizer(tmp_path, tokenizer_class=kind, chat_template="{{ wrong }}", **settings)
    (tmp_path / "chat_template.jinja").write_text(template)
    if others:
        change_json(tmp_path, "special_tokens_map.json", **others)
    messages = [{"role": "user", "content": "x"}]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert Tokenizer(tmp_path).render_chat(messages) == expected
    assert kind != "Qwen2Tokenizer" or "<|endoftext|>" in expected or "unk_token" in others


# --- code ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_code(tmp_path, monkeypatch):
    """A folder whose tokenizer is Python code, and which leaves a file behind if it is run."""
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("transformers asked on stdin"))
    add_tokenizer(
        tmp_path, tokenizer_class="Own", chat_template=TEMPLATE, auto_map={"AutoTokenizer": ["own.Own", None]}
    )
    (tmp_path / "own.py").write_text(
        f"open({str(tmp_path / 'was_run')!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast): pass\n"
    )
    yield tmp_path
    assert not (tmp_path / "was_run").exists()


def test_code_in_the_folder_is_never_run(with_code):
    tokenizer = Tokenizer(with_code)
    turns = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})
    record = DataRecord("here", None, turns, 1)
    assert tokenizer.encode("def add(")[0] == 1
    with refused(TokenizerError, str(with_code), "cannot load this tokenizer", "Python code"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    with refused(TokenizerError, "cannot load this tokenizer"):
        tokenizer.template_reads("tools")
    with refused(TokenizerError, "cannot load this tokenizer"):
        DialogueEncoder(tokenizer, 64).encode([record])
    (with_code / "tokenizer.json").unlink()
    with refused(TokenizerError, str(with_code)):
        Tokenizer(with_code)
