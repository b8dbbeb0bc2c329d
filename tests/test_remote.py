"""Files at URLs: copied once, replaced when they change, continued after an interrupt, and no secret is shown."""

import json
from contextlib import contextmanager
from io import BytesIO

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import known_implementations

from conftest import refused
from draftwing import remote
from draftwing.errors import DataError
from draftwing.lab.bench import find_files as find_sets
from draftwing.remote import download, is_url, local_copy, public_name
from draftwing.text.prompts import read_prompts
from draftwing.train.answer_batch import BatchAnswerer
from draftwing.train.data import find_files, read_files


@pytest.fixture
def store(tmp_path, monkeypatch):
    """``store(path, content)`` writes a file to ``memory://``; every test has a cache folder."""
    monkeypatch.setenv("DRAFTWING_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")

    def write(path, content):
        memory.pipe_file(f"/{path}", content if isinstance(content, bytes) else content.encode())
        return f"memory://{path}"

    yield write
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def again(monkeypatch):
    """``again(url)``: the copy, as another process would make it."""

    def copy(url, *args):
        monkeypatch.setattr(remote, "copies", {})
        return local_copy(url, *args)

    return copy


def test_a_file_is_copied_once_and_replaced_when_it_changes(store, again):
    url, seen = store("data/a.jsonl", "one"), []
    path = again(url, lambda *amounts: seen.append(amounts))
    assert (path.name, path.parent.name, path.read_text()) == ("a.jsonl", "data", "one")
    assert seen[0] == (0, 3)
    assert seen[-1] == (3, 3)
    seen.clear()
    assert again(url, lambda *amounts: seen.append(amounts)) == path
    assert not seen
    store("data/a.jsonl", "two, longer")
    assert local_copy(url).read_text() == "one"  # a process reads one version
    assert again(url).read_text() == "two, longer"


def test_a_folder_is_mirrored(store, again):
    for name in ("set/a.txt", "set/deep/b.txt", "set/.hidden", "settings.txt"):
        store(name, name)
    folder = again("memory://set")
    files = find_files(["memory://set"])
    assert [(file.name, file.path.read_text()) for file in files] == [
        ("a.txt", "set/a.txt"),
        ("deep/b.txt", "set/deep/b.txt"),
    ]
    fsspec.filesystem("memory").rm("/set/a.txt")
    assert again("memory://set/") != folder  # another URL, another copy
    assert [path.name for path in again("memory://set").rglob("*.txt")] == ["b.txt"]


def test_an_interrupted_download_continues(store, again, monkeypatch):
    url = store("data/long.txt", bytes(range(200)))
    monkeypatch.setattr(remote, "CHUNK_BYTES", 50)
    seen, whole_read = [], MemoryFile.read

    def stop(done, total):
        if done == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(url, stop)
    monkeypatch.setattr(MemoryFile, "read", lambda *args: seen.append(args[0].tell()) or whole_read(*args))
    assert again(url).read_bytes() == bytes(range(200))
    assert seen[0] == 100  # from there on, nothing is read twice

    store("data/long.txt", bytes(range(1, 201)))
    with pytest.raises(KeyboardInterrupt):
        again(url, stop)
    store("data/long.txt", bytes(range(2, 202)))  # a part of another version is of no use
    assert again(url).read_bytes() == bytes(range(2, 202))


def test_servers_that_send_only_whole_files(store, again, monkeypatch):
    url = store("data/long.txt", bytes(range(200)))
    monkeypatch.setattr(remote, "CHUNK_BYTES", 50)

    def stop(done, total):
        if done == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(url, stop)

    def seek(self, place, *args):
        if place:
            raise ValueError("Cannot seek streaming HTTP file")
        return BytesIO.seek(self, place)

    monkeypatch.setattr(MemoryFile, "seek", seek)
    assert again(url).read_bytes() == bytes(range(200))


def test_a_file_that_ends_early(store, again, monkeypatch):
    url, info = store("data/a.txt", "short"), MemoryFileSystem.info
    monkeypatch.setattr(MemoryFileSystem, "info", lambda *args, **more: {**info(*args, **more), "size": 9})
    with refused(DataError, "memory://data/a.txt: a.txt should have 9 bytes, and 5 were received: run"):
        again(url)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("memory://nothing/here.txt", ("memory://nothing/here.txt: there is no such file or folder",)),
        ("s3x://bucket/a.txt", ("s3x://bucket/a.txt: the protocol s3x is unknown: give s3://",)),
        ("drive://a.txt", ("drive://a.txt: drive:// needs the package missing_drive: run pip install missing_drive",)),
    ],
)
def test_urls_that_cannot_be_read(url, parts, store, again, monkeypatch):
    missing = {"class": "missing_drive.core.Drive", "err": "Install it"}
    monkeypatch.setitem(known_implementations, "drive", missing)
    with refused(DataError, *parts):
        again(url)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://me:s3cr%40t@host/a/b.jsonl?X-Signature=s3cret%2F#part", "https://host/a/b.jsonl"),
        ("hf://datasets/org/name@main/b.jsonl", "hf://datasets/org/name@main/b.jsonl"),
        ("s3://bucket", "s3://bucket"),
    ],
)
def test_public_names(url, name):
    assert is_url(url)
    assert public_name(url) == name
    assert public_name(name) == name


def test_errors_have_no_secrets(store, again, monkeypatch):
    url = "memory://me:pass%2Fword@host/a.jsonl?X-Signature=s3cret%2Fkey"

    def fail(self, path, **_):
        raise OSError(
            f"403 for {url}, user me:pass/word, s3cret/key, https://other.host/a?token=abcdef by http://u:p@h/"
        )

    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    with pytest.raises(DataError) as caught:
        again(url)
    chain = [caught.value, caught.value.__cause__, caught.value.__context__]
    assert chain[1:] == [None, None]
    for secret in ("pass", "word", "s3cret", "abcdef", "u:p"):
        assert secret not in str(caught.value)
    assert str(caught.value).startswith("memory://host/a.jsonl: it cannot be read (OSError: 403 for memory://")


def test_paths_are_not_urls(tmp_path):
    assert local_copy(tmp_path) == tmp_path
    assert local_copy("C:/data/a.txt").name == "a.txt"
    assert not is_url("-")


def test_the_readers_of_files_take_urls(store):
    records = "".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "two"))
    url = store("mt_bench/question.jsonl", records)
    found = find_files([url])
    assert [record.where for record in read_files(found, None)] == [f"{url}, line 1", f"{url}, line 2"]
    assert read_prompts(url, 1) == ["one"]
    assert list(find_sets([url, f"other={url}"])) == ["mt_bench", "other"]
    with refused(DataError, f"{url}: has no answer to a request"):
        BatchAnswerer([url])


def test_downloads_have_a_phase_each(store):
    titles = []

    @contextmanager
    def phase(title):
        titles.append(title)
        yield lambda done, total: None

    download(["a.txt", store("x/a.txt", "text"), "memory://x/a.txt"], phase)
    assert titles == ["downloading memory://x/a.txt, bytes"]
