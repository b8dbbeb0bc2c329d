"""Streamed data: what is read depends on the sources and the seed alone, also after a stop, and on every process."""

import itertools
import json

import pytest
import torch

from conftest import refused
from draftwing.errors import CheckpointError, ConfigError, DataError
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.answers import read_tasks
from draftwing.train.data import DataSet, DialogueEncoder, download_sources, find_files, read_examples, read_files
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare
from draftwing.train.stream import StreamedBatches
from draftwing.train.trainer import read_metrics
from short_runs import new_target

LENGTH, TOKENS = 24, 96


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return new_target(tmp_path_factory.mktemp("target"))


def texts_of(name, num):
    return [f"{name} {number} " + "def add(rows): return " * (1 + number % 3) for number in range(num)]


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A folder of three Parquet files, with a column that no row uses."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.0)  # 5 s after each Parquet file
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in "abc":
        rows = [{"text": text, "messages": None} for text in texts_of(name, 20)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=7)
    return folder


@pytest.fixture
def lines(tmp_path):
    """A file of 40 texts."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of("line", 40)))
    return file


@pytest.fixture
def stream(target):
    """``stream(*sources)``: blocks of a third of a file."""

    def make(*sources, characters=600, **options):
        encoder = DialogueEncoder(Tokenizer(target), LENGTH)
        return StreamedBatches(find_files(sources), encoder, TOKENS, block_characters=characters, **options)

    return make


def rows_of(batches):
    return [tuple(ids[:length]) for b in batches for ids, length in zip(b.ids.tolist(), b.lengths, strict=True)]


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a.ids, b.ids) for a, b in zip(one, other, strict=True))


def test_every_record_is_read_once_an_epoch(stream, lines, target):
    batches = stream(lines, characters=500)
    ids = read_examples([lines], Tokenizer(target), max_length=LENGTH).stream.tolist()
    read, epochs, number = [], [], 0
    while len(epochs) < 2:
        batch = batches.batch(number)
        if batches.position["epoch"] == len(epochs) + 1:
            epochs.append(read)
            read = []
        prefix = len(batches.training.prefix)
        read += [token for row in rows_of([batch]) for token in row[prefix:]]
        number += 1
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(ids)
    assert epochs[0] != epochs[1]
    assert batches.position["block"] > 6


def test_batches_are_functions_of_their_numbers(stream, lines):
    batches, again = stream(lines), stream(lines)
    read = [batches.batch(number) for number in range(30)]
    assert equal(read, [again.batch(number) for number in range(30)])
    assert equal(read[3:5], [batches.batch(number) for number in (3, 4)])  # backwards
    assert not equal(read, [stream(lines, seed=1).batch(number) for number in range(30)])


@pytest.mark.parametrize("stop", [1, 17])
def test_a_resumed_stream_reads_the_same(stop, stream, lines):
    batches = stream(lines)
    read = [batches.batch(number) for number in range(30)]
    stopped = stream(lines)
    stopped.batch(stop)
    position = json.loads(json.dumps(stopped.position))
    resumed = stream(lines)
    resumed.restore(position)
    assert equal(read[stop:], [resumed.batch(number) for number in range(stop, 30)])


def test_processes_share_the_rows(stream, lines):
    whole, parts = stream(lines), [stream(lines) for _ in range(2)]
    for number in range(12):
        rows = [rows_of([part.batch(number, rank, 2)]) for rank, part in enumerate(parts)]
        assert sorted(itertools.chain(*rows)) == sorted(rows_of([whole.batch(number)]))


def test_what_is_held_out_is_in_no_block(stream, tmp_path):
    dialogues = [{"prompt": f"question {number}", "response": f"answer {number}"} for number in range(60)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(dialogue) + "\n" for dialogue in dialogues * 2))  # duplicates in later blocks
    batches = stream(file, validation_share=0.2)
    held = {tuple(example.ids.tolist()) for example in batches.validation.examples}
    rows = set(rows_of(batches.batch(number) for number in range(40)))
    assert batches.position["epoch"] >= 1
    assert held
    assert not held & rows
    assert len(rows) > 30


def test_sources_take_turns(stream, lines, tmp_path, target):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of("other", 20)))
    first = stream(lines, other).training
    decode = Tokenizer(target).decode
    starts = [decode(first.stream[at : at + 8].tolist(), skip_special_tokens=True).split()[0] for at in first.starts]
    assert starts[:6] == ["line", "other"] * 3


def test_a_stream_of_too_little(stream, tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text('{"text": "one"}\n')
    with refused(DataError, "one.jsonl: all of its 0 dialogues and sections of text are held out"):
        stream(file, validation_share=0.1)
    file.write_text('{"text": " "}\n')
    with refused(DataError, "one.jsonl: nothing is left to train on (1 with no text)"):
        stream(file)


def test_positions_belong_to_their_sources(stream, lines, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(lines.read_text())
    with refused(DataError, "texts.jsonl, and the data is", "other.jsonl: give the same --data"):
        stream(other).restore(stream(lines).position)


@pytest.mark.parametrize(
    ("url", "path", "options"),
    [
        ("hf://datasets/org/name", "org/name", {"name": None, "split": "train", "revision": None}),
        ("hf://datasets/squad/", "squad", {"name": None, "split": "train", "revision": None}),
        (
            "hf://datasets/org/na-me_1@v2?config=en&split=train_sft",
            "org/na-me_1",
            {"name": "en", "split": "train_sft", "revision": "v2"},
        ),
    ],
)
def test_data_sets_of_the_hub(url, path, options):
    (source,) = find_files([url])
    assert isinstance(source, DataSet)
    assert (source.path, dict(source.options)) == (path, options)
    download_sources([url], lambda title: pytest.fail("a data set is not copied"))


@pytest.mark.parametrize("source", ["hf://datasets/org/name/file.jsonl", "s3://datasets/org/name", "org/name"])
def test_other_sources_are_no_data_sets(source):
    assert DataSet.at(source) is None


def test_mistyped_data_sets(tmp_path, monkeypatch):
    with refused(DataError, "unknown parameter 'splits': a data set takes config and split"):
        find_files(["hf://datasets/org/name?splits=train"])
    monkeypatch.chdir(tmp_path)
    with refused(DataError, "org/name: there is no such file", "or give hf://datasets/org/name for a data set"):
        find_files(["org/name"])


# --- through the package ``datasets`` --------------------------------------------------------------------------------


def test_parquet_files_are_read(tables):
    (tables / "notes.txt").write_text("a note")
    records = list(read_files(find_files([tables]), None))
    texts = [record.text for record in records]
    assert texts == ["a note", *texts_of("a", 20), *texts_of("b", 20), *texts_of("c", 20)]
    assert records[-1].where == f"{tables}, record 60"
    file = tables / "b.parquet"
    assert [task.where for task in read_tasks([file], limit=2)] == [f"{file}, record 1", f"{file}, record 2"]


@pytest.mark.parametrize("stop", [2, 33])
def test_a_resumed_data_set_reads_the_same(stop, stream, tables, lines):
    batches = stream(tables, lines)
    read = [batches.batch(number) for number in range(40)]
    assert batches.position["epoch"] == 1
    stopped = stream(tables, lines)
    stopped.batch(stop)
    resumed = stream(tables, lines)
    resumed.restore(json.loads(json.dumps(stopped.position)))
    assert equal(read[stop:], [resumed.batch(number) for number in range(stop, 40)])


def test_damaged_data_sets(tmp_path):
    file = tmp_path / "bad.parquet"
    file.write_bytes(b"PAR1 no table")
    with refused(DataError, "bad.parquet: cannot be read (", "check its name, ?config= and ?split="):
        list(read_files(find_files([file]), None))


def test_a_bad_record_of_a_stream_is_named_by_its_number(stream, tmp_path):
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "bad.parquet"
    rows = [{"text": "one", "note": "x"}, {"text": None, "note": "x"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    with refused(DataError, "bad.parquet, record 2"):
        stream(file)


def test_without_the_package(tables, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with refused(ConfigError, "needs the package datasets: run pip install"):
        list(read_files(find_files([tables]), None))


def test_a_streamed_run_resumes(target, tables, lines, tmp_path):
    def run(out, data, stop=99):
        options = TrainOptions(
            "eagle3", iterations=6, save_every=2, eval_every=6, eval_prompts=1, eval_tokens=2, max_length=LENGTH,
            tokens_per_batch=TOKENS, precision="no", validation_share=0.1, keep_prompts=2,
        )  # fmt: skip
        session = prepare(RunFiles(target, data), options, tmp_path / out, dtype="float32", device="cpu")

        def on_progress(progress):
            session.trainer.stopping = progress.iteration >= stop

        session.trainer.on_progress = on_progress
        session.run()
        return session

    session = run("whole", [tables])
    assert "at first, then more of the stream" in session.describe()
    run("stopped", [tables], stop=3)
    run("stopped", [tables])
    losses = [[line["loss"] for line in read_metrics(tmp_path / out)] for out in ("whole", "stopped")]
    assert losses[0] == losses[1]
    training = json.loads((tmp_path / "whole" / "head" / "config.json").read_text())["draftwing"]["training"]
    assert training["streamed"]
    assert "tokens_in_data" not in training
    run("other", [lines], stop=1)
    with refused(CheckpointError, "holds a run on data that was not streamed"):
        run("other", [tables])
