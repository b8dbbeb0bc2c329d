"""One thread owns the model: tickets, slow readers, limits, and what becomes of everybody when it ends or breaks."""

import threading
import time

import pytest

from conftest import refused
from draftwing.errors import BusyError, ClosedError, ConfigError, SamplingError
from draftwing.sampling import Sampling
from draftwing.worker import Worker
from serving import TEXTS, chat_folder, load

LONG = Sampling(max_tokens=100, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def lm(folder_of, tmp_path_factory):
    return load(chat_folder(folder_of, tmp_path_factory), draft_options={"min_match": 1})


@pytest.fixture
def worker_of(lm):
    made = []

    def make(max_batch=2, **options):
        worker = Worker(lm.engine(max_batch=max_batch), max_running=max_batch, **options)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        assert worker.stop()


def silent():
    pass


def ended(*tickets):
    """Wait until they have."""
    for _ in range(3000):
        if all(ticket.is_done for ticket in tickets):
            return
        time.sleep(0.01)
    raise AssertionError("a ticket never ended")


def test_texts_come_in_pieces_to_whoever_asks(lm, worker_of):
    worker, news = worker_of().start(), threading.Semaphore(0)
    tickets = [worker.submit(lm.encode(text), LONG, news.release, keeps_steps=True) for text in TEXTS]
    texts, tokens = [""] * 3, [[] for _ in TEXTS]
    while not all(ticket.is_done for ticket in tickets):
        assert news.acquire(timeout=30)
        for number, ticket in enumerate(tickets):
            for part in ticket.take()[0]:
                assert part.step.rows[part.place] is part.row
                texts[number] += part.row.text
                tokens[number] += part.row.token_ids
    for number, ticket in enumerate(tickets):
        for part in ticket.take()[0]:
            texts[number] += part.row.text
            tokens[number] += part.row.token_ids
    expected = lm.generate(TEXTS, LONG)
    assert texts == [each.text for each in expected]
    assert tokens == [each.token_ids for each in expected]


def test_who_reads_late_gets_all_of_it_in_few_parts_and_is_told_once(lm, worker_of, monkeypatch):
    monkeypatch.setattr("draftwing.worker._MAX_PARTS", 4)
    told = []
    ticket = worker_of().start().submit(lm.encode(TEXTS[0]), LONG, lambda: told.append(1), keeps_steps=True)
    ended(ticket)
    parts, done = ticket.take()
    (expected,) = lm.generate([TEXTS[0]], LONG)
    assert done
    assert len(parts) == 4
    assert parts[-1].step is None
    assert "".join(part.row.text for part in parts) == expected.text
    assert [token for part in parts for token in part.row.token_ids] == expected.token_ids
    assert [each.token for part in parts for each in part.row.logprobs] == expected.token_ids
    assert sum(part.row.num_accepted for part in parts) == expected.stats.num_accepted
    assert len(told) <= 2  # that there is something, and that it ended
    assert ticket.take() == ([], True)


def test_limits_and_bad_requests_are_refused(lm, worker_of):
    worker, ids = worker_of(max_batch=1, max_waiting=1), lm.encode(TEXTS[0])  # not started: nothing ends
    with refused(SamplingError, "outside the target's vocabulary"):
        worker.submit(ids, Sampling(stop_tokens=[999]), silent)
    tickets = [worker.submit(ids, LONG, silent) for _ in range(2)]
    with refused(BusyError, "2 requests run or wait already"):
        worker.submit(ids, LONG, silent)
    worker.start()
    ended(*tickets)
    ended(worker.submit(ids, LONG, silent))
    for options in ({"max_running": 0}, {"max_running": 1, "max_waiting": -1}, {"max_running": True}):
        with refused(ConfigError, "must be at least"):
            Worker(lm.engine(), **options)


def test_cancelled_requests_end_and_the_others_go_on(lm, worker_of):
    worker = worker_of(max_batch=1)
    first, second, third = (worker.submit(lm.encode(text), LONG, silent) for text in TEXTS)
    worker.cancel(second)
    worker.start()
    ended(first, second, third)
    worker.cancel(first)
    assert [ticket.request.finish_reason for ticket in (first, second, third)] == ["length", "cancelled", "length"]
    assert second.request.token_ids == []
    assert third.request.text == lm.generate([TEXTS[2]], LONG)[0].text
    assert worker.num_open == 0


def test_draining_finishes_what_is_there_and_takes_nothing_new(lm, worker_of):
    worker = worker_of()
    tickets = [worker.submit(lm.encode(text), LONG, silent) for text in TEXTS]
    worker.drain()
    with refused(ClosedError, "shutting down"):
        worker.submit(lm.encode(TEXTS[0]), LONG, silent)
    assert worker.state == "draining"
    worker.start()
    ended(*tickets)
    assert [ticket.request.finish_reason for ticket in tickets] == ["length"] * 3


def test_stopping_cancels_and_ends_the_thread(lm, worker_of):
    worker = worker_of().start()
    ticket = worker.submit(lm.encode(TEXTS[0]), Sampling(max_tokens=200, ignore_eos=True), silent)
    assert worker.stop()
    assert ticket.is_done
    assert ticket.request.finish_reason in ("cancelled", "length")
    assert worker.state == "stopped"
    worker = worker_of()  # not started: nothing ends by itself
    ticket = worker.submit(lm.encode(TEXTS[0]), LONG, silent)
    assert worker.stop()
    assert ticket.request.finish_reason == "cancelled"


def test_a_broken_engine_ends_everybody_with_the_reason(lm, worker_of, monkeypatch):
    worker = worker_of()
    tickets = [worker.submit(lm.encode(text), LONG, silent) for text in TEXTS]
    forward, calls = lm.target.forward, []

    def broken(*args):
        calls.append(1)
        if len(calls) > 3:
            raise MemoryError("no room")
        return forward(*args)

    monkeypatch.setattr(lm.target, "forward", broken)
    worker.start()
    ended(*tickets)
    monkeypatch.undo()
    assert {ticket.request.finish_reason for ticket in tickets} == {"error"}
    assert "MemoryError: no room" in str(tickets[0].request.error)
    assert worker.state == "failed"
    with refused(ClosedError, "the engine failed", "restart"):
        worker.submit(lm.encode(TEXTS[0]), LONG, silent)


def test_a_reader_that_fails_is_gone_and_the_others_are_not(lm, worker_of):
    def broken():
        raise RuntimeError("the event loop is closed")

    worker = worker_of()
    first, second = worker.submit(lm.encode(TEXTS[0]), LONG, broken), worker.submit(lm.encode(TEXTS[1]), LONG, silent)
    worker.start()
    ended(first, second)
    assert first.request.finish_reason == "cancelled"
    assert second.request.text == lm.generate([TEXTS[1]], LONG)[0].text
