"""The worker: tickets, slow readers, limits, and how requests end when it stops or fails."""

import threading
import time

import pytest

from conftest import refused
from draftwing.errors import BusyError, ClosedError, ConfigError, SamplingError
from draftwing.request import Request
from draftwing.sampling import Sampling
from draftwing.serve.trace import Tracer
from draftwing.worker import Part, Ticket, Worker
from serving import TEXTS, chat_folder, load

LONG = Sampling(max_tokens=60, ignore_eos=True, logprobs=0)


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


def submit(worker, lm, *texts):
    return [worker.submit(lm.encode(text), LONG, silent) for text in texts]


def ended(*tickets):
    """Wait until they have, and return their reasons."""
    for _ in range(30_000):
        if all(ticket.is_done for ticket in tickets):
            return [ticket.request.finish_reason for ticket in tickets]
        time.sleep(0.01)
    raise AssertionError("a ticket never ended")


def test_texts_come_in_pieces(lm, worker_of):
    worker, news = worker_of().start(), threading.Semaphore(0)
    tickets = [worker.submit(lm.encode(text), LONG, news.release, keeps_steps=True) for text in TEXTS]
    parts, open_tickets = [[] for _ in TEXTS], set(range(3))
    while open_tickets:
        assert news.acquire(timeout=30)
        for number in sorted(open_tickets):
            more, done = tickets[number].take()
            parts[number] += more
            open_tickets -= {number} if done else set()
    expected = lm.generate(TEXTS, LONG)
    for found, each, ticket in zip(parts, expected, tickets, strict=True):
        assert all(part.step.rows[part.place] is part.row for part in found)
        assert "".join(part.row.text for part in found) == each.text
        assert [token for part in found for token in part.row.token_ids] == each.token_ids
        times = [ticket.submitted_at, *(part.at for part in found)]
        assert times == sorted(times)


def test_a_late_reader_gets_everything_in_few_parts_and_is_woken_once(lm, worker_of, monkeypatch):
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
    starts = [len(lm.encode(TEXTS[0])), *(part.row.position + len(part.row.token_ids) for part in parts)]
    assert [part.row.position for part in parts] == starts[:-1]
    assert sum(part.row.num_accepted for part in parts) == expected.stats.num_accepted
    assert sum(part.row.num_drafted for part in parts) == expected.stats.num_drafted > 0
    assert len(told) <= 2  # that there is something, and that it ended
    assert ticket.take() == ([], True)


def test_traces_of_merged_steps_have_their_text_and_no_drafts(lm, monkeypatch):
    monkeypatch.setattr("draftwing.worker._MAX_PARTS", 2)
    ids = lm.encode(TEXTS[0])
    steps = [answer.step for answer in lm.stream(ids, LONG)]
    middle = len(steps) // 2
    ticket, tracer = Ticket(Request(0, ids, LONG), silent, keeps_steps=True), Tracer(lm.tokenizer, ids, LONG)
    for some in (steps[:middle], steps[middle:]):
        for step in some:
            ticket.put(Part(step.rows[0], step))
        traces = [tracer.trace(part.row, part.step) for part in ticket.take()[0]]
        assert ["nodes" in trace for trace in traces] == [True, False]
        text = "".join(step.rows[0].text for step in some)
        assert "".join(piece["text"] for trace in traces for piece in trace["pieces"]) == text
        first, merged = ({piece["drafted"] for piece in trace["pieces"]} for trace in traces)
        assert first <= {True, False}
        assert merged == {None}
    assert sum(step.rows[0].num_accepted for step in steps) > 0


def test_limits_and_bad_requests_are_refused(lm, worker_of):
    worker = worker_of(max_batch=1, max_waiting=1)  # not started: nothing ends
    with refused(SamplingError, "outside the target's vocabulary"):
        worker.submit([5], Sampling(stop_tokens=[999]), silent)
    tickets = submit(worker, lm, *TEXTS[:2])
    with refused(BusyError, "2 requests run or wait already"):
        submit(worker, lm, TEXTS[2])
    worker.start()
    ended(*tickets)
    ended(*submit(worker, lm, TEXTS[2]))
    for options in ({"max_running": 0}, {"max_running": 1, "max_waiting": -1}, {"max_running": True}):
        with refused(ConfigError, "must be at least"):
            Worker(lm.engine(), **options)


def test_cancelled_requests_end_and_the_others_go_on(lm, worker_of):
    worker = worker_of(max_batch=1)
    first, second, third = submit(worker, lm, *TEXTS)
    worker.cancel(second)
    worker.start()
    assert ended(first, second, third) == ["length", "cancelled", "length"]
    worker.cancel(first)
    assert first.request.finish_reason == "length"
    assert second.request.token_ids == []
    assert third.request.text == lm.generate([TEXTS[2]], LONG)[0].text
    assert worker.num_open == 0


def test_draining_finishes_what_is_there_and_takes_nothing_new(lm, worker_of):
    worker = worker_of()
    tickets = submit(worker, lm, *TEXTS)
    worker.drain()
    with refused(ClosedError, "shutting down"):
        submit(worker, lm, TEXTS[0])
    assert worker.state == "draining"
    worker.start()
    assert ended(*tickets) == ["length"] * 3


def test_what_was_accepted_may_be_submitted_while_draining_but_not_after_stopping(lm, worker_of):
    worker = worker_of().start()
    with worker.accept():
        worker.drain()
        with refused(ClosedError, "shutting down"), worker.accept():
            pass
        assert worker.num_accepted == 1
        assert ended(*submit(worker, lm, TEXTS[0])) == ["length"]
        assert worker.stop()
        with refused(ClosedError, "shutting down"):
            submit(worker, lm, TEXTS[0])
    assert worker.num_accepted == 0


def test_stopping_cancels_and_ends_the_thread(lm, worker_of):
    worker = worker_of().start()
    ticket = worker.submit(lm.encode(TEXTS[0]), Sampling(max_tokens=200, ignore_eos=True), silent)
    assert worker.stop()
    assert ticket.is_done
    assert ticket.request.finish_reason in ("cancelled", "length")
    assert worker.state == "stopped"
    worker = worker_of()  # not started: nothing ends by itself
    (ticket,) = submit(worker, lm, TEXTS[0])
    assert worker.stop()
    assert ticket.request.finish_reason == "cancelled"


def test_a_broken_engine_ends_everybody_with_the_reason(lm, worker_of, monkeypatch):
    worker = worker_of()
    tickets = submit(worker, lm, *TEXTS)
    forward, calls = lm.target.forward, []

    def broken(*args):
        calls.append(1)
        if len(calls) > 3:
            raise MemoryError("no room")
        return forward(*args)

    monkeypatch.setattr(lm.target, "forward", broken)
    worker.start()
    assert ended(*tickets) == ["error"] * 3
    monkeypatch.undo()
    assert "MemoryError: no room" in str(tickets[0].request.error)
    assert worker.state == "failed"
    with refused(ClosedError, "the engine failed", "restart"):
        submit(worker, lm, TEXTS[0])


def test_a_reader_that_fails_is_gone_and_the_others_are_not(lm, worker_of):
    def broken():
        raise RuntimeError("the event loop is closed")

    worker = worker_of()
    first, (second,) = worker.submit(lm.encode(TEXTS[0]), LONG, broken), submit(worker, lm, TEXTS[1])
    worker.start()
    assert ended(first, second)[0] == "cancelled"
    assert second.request.text == lm.generate([TEXTS[1]], LONG)[0].text
