"""What is remembered across requests: against brute force, bounded, shared by threads, kept in a file."""

from __future__ import annotations

import os
import threading
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import refused
from draftwing.errors import CheckpointError, DraftwingWarning
from draftwing.methods import retrieval as module
from draftwing.methods.retrieval import Memory
from draftwing.methods.suffix_array import END, SuffixArray, join_texts
from test_suffix_array import EVERYWHERE, TEXT, TEXTS, followers, followers_of

ABOUT = {"vocab_size": 100, "vocab_hash": "", "target": "tiny"}


def filled(texts, most=10_000, **others) -> Memory:
    memory = Memory(most, **others)
    for text in texts:
        memory.add(text)
    return memory


def texts_in(memory: Memory) -> Counter[tuple[int, ...]]:
    tokens = [token for part in memory.parts for token in part.tokens.tolist()]
    found, text = [], []
    for token in tokens:
        if token == END:
            found.append(tuple(text))
            text = []
        else:
            text.append(token)
    assert not text
    return Counter(found)


@given(TEXTS, TEXT)
@EVERYWHERE
def test_it_finds_what_one_array_of_all_would(texts, ending):
    memory = filled(texts)
    whole = SuffixArray(join_texts([text for text in texts if len(text) > 1]))
    ours, theirs = memory.match(ending, 1, 6), whole.match(ending, 1, 6)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert ours.length == theirs.length
        assert followers_of(memory, ours.place) == followers_of(whole, theirs.place)
        for each in memory.followers(ours.place):
            wanted = followers(texts, [*ending[-ours.length :], each.token])
            assert followers_of(memory, each.place) == wanted


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=40), st.integers(20, 200))
@settings(EVERYWHERE, max_examples=50)
def test_it_stays_within_its_bound_and_forgets_the_oldest(texts, most):
    memory = Memory(most)
    kept: list[tuple[int, ...]] = []
    for text in texts:
        memory.add(text)
        if len(text) > 1:
            kept.append(tuple(text[-(most // 2 - 1) :]))
        held = texts_in(memory)
        assert len(memory) == sum(len(text) + 1 for text in held.elements()) <= most
        # The newest ones, without a gap.
        newest = kept[len(kept) - held.total() :]
        assert held == Counter(newest)
        forgotten = sum(len(text) + 1 for text in kept) - len(memory)
        assert not forgotten or len(memory) > most // 4
        # Each array is more than twice as large as the next, but for those that may grow no further.
        assert len(memory.parts) <= 2 + 2 * max(most, 2).bit_length()


def test_sizes_of_its_arrays_fall_by_half():
    memory = Memory(100_000)
    for number in range(300):
        memory.add([number % 50, 1, 2, 3])
    sizes = [len(part) for part in memory.parts]
    assert sum(sizes) == 1500
    assert all(larger > 2 * smaller for larger, smaller in pairwise(sizes))
    for part in memory.parts:
        suffixes = [part.tokens[start:].tolist() for start in part.order]
        assert suffixes == sorted(suffixes)


def test_threads_share_it():
    """Writers add and one reads, all at once: it never fails, sees a half text, or loses one that it has seen."""
    memory, failures, stop = Memory(50_000), [], threading.Event()

    def write(own: int) -> None:
        for number in range(12):
            memory.add([own, number, own, number + 1])

    def read() -> None:
        seen = 0
        try:
            while not stop.is_set():
                found = memory.match([1], 1, 1)
                times = sum(each.times for each in memory.followers(found.place)) if found else 0
                assert times >= seen
                seen = times
        except Exception as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(own,)) for own in (1, 1000, 2000)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert not failures
    wanted = [[own, number, own, number + 1] for own in (1, 1000, 2000) for number in range(12)]
    assert texts_in(memory) == Counter(map(tuple, wanted))
    found = memory.match([1], 1, 1)
    assert found is not None
    assert followers_of(memory, found.place) == followers(wanted, [1])


# --- in a file -------------------------------------------------------------------------------------------------------


def test_it_is_kept_in_a_file(tmp_path):
    file = tmp_path / "new" / "memory"
    memory = filled([[1, 2, 3, 4], [5, 1, 2, 6]], file=file, about=ABOUT)
    memory.save()
    before = file.stat().st_mtime_ns, file.stat().st_ino
    memory.save()  # nothing is new
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == before
    again = Memory(10_000, file, ABOUT)
    assert texts_in(again) == texts_in(memory)
    again.add([1, 2, 7])
    again.save()
    third = Memory(10_000, file, ABOUT)
    found = third.match([1, 2], 1, 4)
    assert found is not None
    assert followers_of(third, found.place) == {3: 1, 6: 1, 7: 1}
    assert [path.name for path in file.parent.iterdir()] == ["memory"]


def test_a_smaller_bound_holds_for_what_is_read(tmp_path):
    file = tmp_path / "memory"
    filled([[number] * 20 for number in range(40)], file=file, about=ABOUT).save()
    assert len(Memory(10_000, file, ABOUT)) == 840
    assert len(Memory(300, file, ABOUT)) <= 300


def test_it_forgets_what_came_after_it_was_read(tmp_path):
    file = tmp_path / "memory"
    memory = filled([[1, 2, 3]], file=file, about=ABOUT)
    memory.save()
    memory.forget()
    assert len(memory) == 0
    again = Memory(1000, file, ABOUT)
    again.add([4, 5, 6])
    again.forget()
    assert texts_in(again) == {(1, 2, 3): 1}
    again.save()
    assert texts_in(Memory(1000, file, ABOUT)) == {(1, 2, 3): 1}


def test_it_is_written_now_and_then_where_requests_never_pause(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAVE_INTERVAL_TOKENS", 10)
    memory = Memory(1000, tmp_path / "memory", ABOUT)
    memory.add([1, 2, 3, 4])
    assert not (tmp_path / "memory").exists()
    memory.add([1, 2, 3, 4, 5, 6])
    assert (tmp_path / "memory").exists()


def test_what_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    memory = filled([[1, 2, 3]], file=tmp_path / "memory", about=ABOUT)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.warns(DraftwingWarning, match=r"memory: former requests cannot be stored \(.*No space left"):
            memory.save()
    assert list(tmp_path.iterdir()) == []
    memory.add([4, 5])
    memory.save()
    assert texts_in(Memory(1000, tmp_path / "memory", ABOUT)) == {(1, 2, 3): 1, (4, 5): 1}


def test_what_a_killed_writer_left_is_swept(tmp_path):
    """What a process that still runs is writing is not."""
    (tmp_path / ".memory.0.99999999.partial").write_text("half")
    running = tmp_path / f".memory.0.{os.getppid()}.partial"
    running.write_text("under way")
    filled([[1, 2, 3]], file=tmp_path / "memory", about=ABOUT).save()
    assert {path.name for path in tmp_path.iterdir()} == {"memory", running.name}


def test_a_damaged_file_is_refused_by_name(tmp_path):
    file = tmp_path / "memory"
    filled([[1, 2, 3]] * 9, file=file, about=ABOUT).save()
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
    with refused(CheckpointError, str(file), "damaged", "delete it and recreate it"):
        Memory(1000, file, ABOUT)


def test_a_reader_keeps_what_it_looks_at():
    """An array that has been merged or forgotten since goes on to answer."""
    memory = filled([[1, 2, 3]], most=40)
    found = memory.match([1], 1, 1)
    assert found is not None
    for _ in range(30):
        memory.add([7, 8, 9, 7, 8])
    assert memory.match([1], 1, 1) is None
    assert followers_of(memory, found.place) == {2: 1}
    assert isinstance(memory.parts[0].tokens, np.ndarray)
