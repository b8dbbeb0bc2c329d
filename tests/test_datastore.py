"""Datastores: built from files, checked when they are opened, whole or not there at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import draftwing as dw
from conftest import TEXTS as SOURCES
from conftest import add_tokenizer, refused
from draftwing.cli import main as cli
from draftwing.errors import CheckpointError, ConfigError, DataError, TokenizerError
from draftwing.methods import suffix_array as module
from draftwing.methods.registry import drafter_maker, method_of_folder
from draftwing.methods.suffix_array import (
    END,
    TEXTS_FILE,
    SuffixArray,
    join_texts,
    read_datastore,
    read_store,
    write_datastore,
    write_store,
)
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import read_texts

ABOUT = {"target": "tiny", "vocab_size": 50, "vocab_hash": "", "num_files": 1}


@pytest.fixture(scope="module")
def target(folder_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("datastore") / "target"
    return add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300, head_dim=32), folder))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "code.py").write_text(SOURCES[0] + "\n" + SOURCES[1])
    talk = {"messages": [{"role": "user", "content": "Add?"}, {"role": "assistant", "content": SOURCES[2]}]}
    (folder / "talk.jsonl").write_text(json.dumps(talk) + "\n" + json.dumps({"text": ""}) + "\n")
    return folder


@pytest.fixture(scope="module")
def store(target, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store") / "texts"
    done = run("datastore", "build", files, "--target", target, "--out", folder)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def small(tmp_path):
    """A store of a few tokens in blocks so small that there are many."""
    texts = SuffixArray(join_texts([list(range(40)), [1, 2, 3], [1, 2, 4]]))
    return write_datastore(tmp_path / "small", texts, ABOUT)


def run(*args: object):
    return CliRunner().invoke(cli.app, [str(each) for each in args])


# --- building --------------------------------------------------------------------------------------------------------


def test_what_is_in_it(store, target, files):
    tokenizer, found = Tokenizer(target), read_datastore(store, whole=True)
    tokens = found.parts[0].tokens.tolist()
    texts, text = [], []
    for token in tokens:
        if token == END:
            texts.append(tokenizer.decode(text))
            text = []
        else:
            text.append(token)
    assert texts == [SOURCES[0] + "\n" + SOURCES[1], "Add?", SOURCES[2]]
    order = found.parts[0].order
    assert isinstance(order, np.memmap)
    assert order.tolist() == sorted(range(len(tokens)), key=lambda start: tokens[start:])
    assert found.about["num_texts"] == 3
    assert found.about["num_tokens"] == len(tokens) - 3
    assert found.about["vocab_hash"] == tokenizer.vocab_hash
    assert {path.name for path in store.iterdir()} == {TEXTS_FILE, "config.json"}
    assert [path.name for path in store.parent.iterdir()] == [store.name]


def test_build_says_what_it_did(target, files, tmp_path):
    done = run("datastore", "build", files / "code.py", "-t", target, "-o", tmp_path / "a", "--json")
    found = json.loads(done.stdout)
    assert found["num_files"] == found["num_texts"] == 1
    assert found["num_bytes"] == (tmp_path / "a" / TEXTS_FILE).stat().st_size
    done = run("datastore", "build", files, "-t", target, "-o", tmp_path / "b")
    assert "tokens in 3 texts" in done.stderr
    assert f"--draft {tmp_path / 'b'}" in done.stderr


def test_info(store):
    table = run("datastore", "info", store)
    for word in ("num tokens", "num texts", "vocab hash", "in part"):
        assert word in table.stdout
    found = json.loads(run("datastore", "info", store, "--check", "--json").stdout)
    assert found["folder"] == str(store)
    assert found["num_texts"] == 3
    assert found["checked"] is True


def test_progress_reaches_the_end(target, files):
    seen = []
    _, num_files = read_texts([files], Tokenizer(target), on_progress=lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in files.iterdir())
    assert seen[-1] == (total, total)
    assert num_files == 2


def test_what_build_refuses(target, files, store, tmp_path):
    tokenizer = Tokenizer(target)
    with refused(ConfigError, str(store), "is there already", "choose another folder"):
        write_datastore(store, SuffixArray(read_texts([files], tokenizer)[0]), ABOUT)
    with refused(DataError, "nowhere", "no such file"):
        read_texts([tmp_path / "nowhere"], tokenizer)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    with refused(DataError, "empty.jsonl", "there is no text in it"):
        read_texts([tmp_path / "empty.jsonl"], tokenizer)
    done = run("datastore", "build", files, "-t", target, "-o", store)
    assert done.exit_code == 2
    assert "is there already" in done.stderr


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused(CheckpointError, str(tmp_path / "store"), "cannot be written", "No space left"):
        write_datastore(tmp_path / "store", SuffixArray(join_texts([[1, 2]])), ABOUT)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_nothing_half(tmp_path):
    """Killed while it writes: the folder does not exist. The next build removes the leftovers."""
    out = tmp_path / "store"
    child = os.fork()
    if child == 0:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        try:
            write_datastore(out, SuffixArray(join_texts([[1, 2, 3]])), ABOUT)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".store.")
    assert leftover.name.endswith(f".{child}.partial")
    write_datastore(out, SuffixArray(join_texts([[1, 2, 3]])), ABOUT)
    assert list(tmp_path.iterdir()) == [out]
    read_datastore(out, whole=True)


# --- opening ---------------------------------------------------------------------------------------------------------


def test_it_is_a_kind_of_draft(store, target):
    assert method_of_folder(store).name == "rest"
    lm = dw.load(target, store, dtype="float64", device="cpu", draft_options={"min_match": 1, "max_match": 4})
    plain = dw.load(target, "none", dtype="float64", device="cpu")
    found = lm.generate(SOURCES[0], max_tokens=12, ignore_eos=True, speculation=dw.Budget(4, 2))[0]
    assert found.token_ids == plain.generate(SOURCES[0], max_tokens=12, ignore_eos=True)[0].token_ids
    assert found.stats.num_drafted > 0
    assert lm.drafter.identity == read_datastore(store).about["identity"]


def test_another_tokenizers_store_is_refused(store, target, folder_of, tmp_path):
    other = shutil.copytree(target, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = sorted(vocab, key=vocab.__getitem__)[10:12]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with refused(TokenizerError, str(store), "of the tokenizer of", "is not this target's", "--target"):
        dw.load(other, store, device="cpu")
    smaller = dw.load(target, "none", device="cpu").target
    smaller.vocab_size = 100
    with refused(TokenizerError, str(store), "(300 tokens), which is not this target's (100)"):
        drafter_maker(store, smaller, None, device=lambda: smaller.device)


def test_a_folder_that_is_no_datastore(target, tmp_path):
    with refused(CheckpointError, "is no datastore", "draftwing datastore build"):
        read_datastore(target)
    done = run("datastore", "info", tmp_path)
    assert done.exit_code == 2
    assert "error: " in done.stderr


@pytest.mark.parametrize("at", [0, 5, 9, 13, 20, 300, 500, -1])
def test_a_changed_byte_is_found(at, small):
    file = small.path
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)
    with refused(CheckpointError, str(file)):
        read_store(file)


@pytest.mark.parametrize("keep", [0, 3, 12, 17, 200, 400, -4, -1])
def test_a_truncated_file_is_found(keep, small):
    file = small.path
    file.write_bytes(file.read_bytes()[:keep])
    with refused(CheckpointError, str(file)):
        read_store(file)


def test_what_is_wrong_is_said(small):
    file, data = small.path, small.path.read_bytes()
    file.write_bytes(b"something else")
    with refused(CheckpointError, str(file), "found another one", "check the path"):
        read_store(file)
    file.write_bytes(data + b"0")
    with refused(CheckpointError, str(file), "damaged", f"{len(data):,} bytes", "copy it again"):
        read_store(file)
    file.unlink()
    with refused(CheckpointError, str(file), "cannot be read", "check the path"):
        read_store(file)


def test_a_newer_version_is_refused(small, monkeypatch):
    monkeypatch.setattr(module, "VERSION", 2)
    write_store(small.path, small.parts, ABOUT)
    monkeypatch.undo()
    with refused(CheckpointError, "expected version 1", "found 2", "update Draftwing"):
        read_store(small.path)


def test_of_a_large_file_some_blocks_are_checked_and_all_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(module, "NUM_CHECKED", 3)
    file = tmp_path / "file"
    parts = [SuffixArray(join_texts([list(range(200))])), SuffixArray(join_texts([[1, 2], [3]]))]
    write_store(file, parts, {"vocab_size": 300})
    again = read_store(file, whole=True)
    for ours, theirs in zip(parts, again.parts, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.order.tolist() == theirs.order.tolist()
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack("<I", data[8:12])
    begin = -(-(16 + length) // 64) * 64
    num_blocks = (len(data) - begin) // (64 + 4)
    for number, is_seen in ((0, True), (1, False), (num_blocks // 2 - 2, False), (num_blocks - 1, True)):
        damaged = bytearray(data)
        damaged[begin + 64 * number + 8] ^= 1
        file.write_bytes(damaged)
        with refused(CheckpointError, str(file), f"block {number} of {num_blocks}"):
            read_store(file, whole=True)
        if is_seen:
            with refused(CheckpointError, str(file), f"block {number} of {num_blocks}"):
                read_store(file)
        else:
            read_store(file)


def test_no_texts_at_all(tmp_path):
    write_store(tmp_path / "file", [], {"vocab_size": 300})
    assert read_store(tmp_path / "file", whole=True).parts == ()
    write_store(tmp_path / "file", [SuffixArray(join_texts([]))], {"vocab_size": 300})
    (part,) = read_store(tmp_path / "file", whole=True).parts
    assert part.match([1, 2], 1, 2) is None


def test_a_store_that_is_replaced_stays_readable(small, tmp_path):
    """Whoever has mapped the old file goes on to read it."""
    part = small.parts[0]
    write_store(small.path, [SuffixArray(join_texts([[9, 9, 9]]))], ABOUT)
    match = part.match([1, 2], 1, 2)
    assert match is not None
    assert [each.token for each in part.followers(match.place)] == [3, 4]
    assert Path(small.path).stat().st_size < small.num_bytes
