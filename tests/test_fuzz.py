"""Every public callable with hostile values: it works or refuses by name, and what it was called on still works."""

from __future__ import annotations

import asyncio
import collections
import decimal
import fractions
import itertools
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import draftwing as dw
from conftest import add_tokenizer, build
from draftwing.methods.registry import METHODS

# --- hostile values --------------------------------------------------------------------------------------------------


class Rude:
    """Raises whatever is done with it."""

    def __init__(self, *methods: str) -> None:
        self.methods = methods

    def _fail(self, name: str) -> None:
        if name in self.methods or not self.methods:
            raise RuntimeError(f"no {name} here")

    def __repr__(self) -> str:
        self._fail("repr")
        return "Rude()"

    def __iter__(self) -> Iterator[int]:
        self._fail("iter")
        return iter((5, 6))

    def __bool__(self) -> bool:
        self._fail("bool")
        return True

    def __len__(self) -> int:
        self._fail("len")
        return 2

    def __eq__(self, other: object) -> bool:
        self._fail("eq")
        return self is other

    def __hash__(self) -> int:
        self._fail("hash")
        return 1

    def __getitem__(self, index: Any) -> int:
        self._fail("getitem")
        return [5, 6][index]

    def __float__(self) -> float:
        self._fail("float")
        return 1.0

    def __index__(self) -> int:
        self._fail("index")
        return 1


class RudeInt(int):
    def __repr__(self) -> str:
        raise RuntimeError("no repr here")


class RudeText(str):
    def __repr__(self) -> str:
        raise RuntimeError("no repr here")


class RudeList(list):
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no iter here")


class RudeDict(dict):
    def keys(self) -> Any:
        raise RuntimeError("no keys here")

    items = __iter__ = __getitem__ = get = keys  # type: ignore[assignment]


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def nested(depth: int = 10_000) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def generator() -> Iterator[int]:
    yield 5
    raise RuntimeError("no more")


class Starts:
    """Looks like a constraint, but its states are none."""

    def start(self) -> int:
        return 5


class StartsBadly:
    def start(self) -> Any:
        raise RuntimeError("no start here")


class Stateful:
    """A constraint whose mask is not one."""

    def __init__(self, mask: Any = None) -> None:
        self.mask = mask

    def start(self) -> Stateful:
        return self

    fork = start

    def allowed(self) -> Any:
        if self.mask is None:
            raise RuntimeError("no mask here")
        return self.mask

    def take(self, token: int) -> None:
        pass


POOL: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (
        None, True, False, 0, -1, 1, 5, 299, 2**31, 2**63, -(2**63), 10**400, 10**5000, 0.5, -0.0, 1.5, float("nan"),
        float("inf"), 1e300, 1e-320, 1j, "", "x", "0", "match", "json", "none", "cpu", "\ud83d", "\0", "a\0b", "x" * 300, "y" * 100_000,
        "/dev/null", "../..", "a+b", "+", b"", b"ab", (), [], {}, [1], [5, 6], [True], [1.5], ["x"], [None], [[]],
        [[1]], [[5, 6], [5]], [[[1]]], [10**400], [-1], range(5), range(0), range(10**9), {1: 2}, {"a": 1}, {5: float("nan")},
        {"role": "user", "content": "x"}, [{"role": "user", "content": 3}], (1, 2), ("x", "x"), {"type": {"type": {}}},
        {5, 6}, frozenset(), object, int, len, print, ..., NotImplemented, object(), Path("x"), Path("x" * 300),
        Path("\0"), slice(5), memoryview(b"ab"), bytearray(b"ab"), ValueError("x"), decimal.Decimal("1.5"),
        fractions.Fraction(1, 3), np.int64(5), np.float32(0.5), np.bool_(True), np.array(5), np.array([5, 6]), np.array([]),
        np.array(["x"]), np.array([None, 5]), np.array([[1, 2], [3, 4]]), np.array([1.5]), np.array([True]), np.datetime64("2020"),
        torch.tensor(5), torch.tensor([5, 6]), torch.tensor([]), torch.tensor([[5, 6], [7, 8]]), torch.tensor([1.5]), torch.tensor([True]),
        torch.empty(2, device="meta"), torch.float32, torch.device("meta"), torch.zeros(1).to_sparse(),
        MappingProxyType({"a": 1}), collections.Counter("ab"), collections.UserList([5]), SimpleNamespace(ndim=1, tolist=lambda: 3),
    )),
    Rude, *(lambda name=name: Rude(name) for name in ("repr", "iter", "bool", "len", "eq", "hash", "getitem", "float", "index")),
    lambda: RudeInt(5), lambda: RudeText("x"), lambda: RudeList([1]), lambda: RudeDict(a=1), itself, nested, generator, itertools.count, lambda: iter([5]),
    MagicMock, Starts, StartsBadly, Stateful, lambda: Stateful(5), lambda: Stateful(np.zeros(3)), lambda: Stateful(np.zeros(10, np.uint32)), threading.Lock, lambda: lambda *_, **__: 5, lambda: lambda: None,
    lambda: dw.Budget(2), lambda: dw.Sampling(), lambda: dw.Grammar.regex("a+"),
]  # fmt: skip


# --- public callables ------------------------------------------------------------------------------------------------


class World:
    """The objects that calls are made on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lm = dw.load(folder, "lookup", budget=dw.Budget(3))
        self.target, self.tokenizer = self.lm.target, self.lm.tokenizer
        self.engine = self.lm.engine()
        self.paged = self.lm.engine(kv_memory=1 << 22)
        self.decoder = self.lm.decoder()
        self.model = build("llama", vocab_size=300)
        self.tree = dw.DraftTree.from_lists([[5, 6, 7]], [[-1, 0, 0]])

    def submit(self, **options: Any) -> None:
        for engine in (self.engine, self.paged):
            engine.submit(**options)
            engine.run()

    def cancel(self, request: Any) -> None:
        self.engine.cancel(request)

    def admit(self, **options: Any) -> None:
        try:
            self.decoder.admit(**options)
            while self.decoder.num_running:
                self.decoder.step()
        finally:
            for request in self.decoder.running:
                self.decoder.retire(request.id)

    def decode(self, **options: Any) -> None:
        decoder = dw.Decoder(**options)
        decoder.admit([5, 6, 5], dw.Sampling(max_tokens=3))
        while decoder.num_running:
            decoder.step()

    def run_engine(self, **options: Any) -> None:
        engine = dw.Engine(**options)
        engine.submit([5, 6, 5], dw.Sampling(max_tokens=3))
        engine.run()

    def run_lm(self, **options: Any) -> None:
        lm = dw.LM(**options)
        lm.generate([5, 6, 5], max_tokens=2)

    def load(self, **options: Any) -> None:
        dw.load(**options).generate([5, 6, 5], max_tokens=2)

    def stream(self, **options: Any) -> None:
        for _ in itertools.islice(self.lm.stream(**options), 4):
            pass

    def astream(self, **options: Any) -> None:
        async def read() -> None:
            steps = self.lm.astream(**options)
            async for _ in steps:
                break
            await steps.aclose()

        asyncio.run(read())

    def text_stream(self, ids: Any, **options: Any) -> None:
        stream = dw.TextStream(**options)
        stream.push(ids)
        stream.flush()

    def tree_of(self, tokens: Any, parents: Any, vocab_size: Any) -> None:
        tree = dw.DraftTree(tokens, parents)
        tree.check(vocab_size)

    def from_lists(self, **options: Any) -> None:
        dw.DraftTree.from_lists(**options).check(300)

    def custom(self, seed_then: Any, stop_strings: Any, stream_to: Any, **options: Any) -> None:
        fast = dw.custom_generate(**options)
        more = {"stop_strings": stop_strings, "seed": seed_then, "stream_to": stream_to}
        self.model.generate(torch.tensor([[5, 6, 5]]), custom_generate=fast, max_new_tokens=2, **more)

    def register(self, **options: Any) -> None:
        before = dict(METHODS)
        try:
            dw.register(**options)
            METHODS[options["name"]].method
        finally:
            METHODS.clear()
            METHODS.update(before)


def calls(world: World) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public callables by name, with valid arguments."""
    lm, short = world.lm, dw.Sampling(max_tokens=3)
    limits = {"speculation": None, "references": (), "grammar": None}
    sampling = {field: value for field, value in vars(dw.Sampling(max_tokens=3)).items()}
    options = {**sampling, **limits, "sampling": None}
    request = {"prompt_ids": [5, 6, 5], "sampling": short, "speculation": None, "references": (), "constraint": None}
    request |= {"drafts": None, "priority": 0, "deadline": None}
    new = lm.new_drafter
    return {
        "load": (
            world.load,
            {
                "target": world.folder,
                "draft": "lookup",
                "rule": "match",
                "budget": None,
                "lossless": True,
                "draft_options": None,
                "dtype": "float32",
                "quantize": None,
                "device": "cpu",
                "engine": "auto",
                "revision": None,
            },
        ),
        "LM": (
            world.run_lm,
            {
                "target": world.target,
                "tokenizer": world.tokenizer,
                "new_drafter": new,
                "rule": "match",
                "budget": None,
                "lossless": True,
            },
        ),
        "LM.generate": (lm.generate, {"prompts": [[5, 6, 5]], "n": 1, "max_batch": 8, "on_step": None, **options}),
        "LM.stream": (world.stream, {"prompt": [5, 6, 5], **options}),
        "LM.astream": (world.astream, {"prompt": [5, 6, 5], **options}),
        "LM.encode": (lm.encode, {"prompt": "x"}),
        "LM.constraint": (lm.constraint, {"grammar": {"type": "object"}}),
        "LM.decoder": (lm.decoder, {"max_batch": 2, "kv_memory": 1 << 22}),
        "LM.engine": (lm.engine, {"max_batch": 2, "kv_memory": 1 << 22}),
        "Decoder": (
            world.decode,
            {
                "target": world.target,
                "drafter": new,
                "rule": "match",
                "budget": None,
                "lossless": True,
                "planner": None,
                "turn": None,
                "kv_memory": 1 << 22,
                "max_batch": 2,
            },
        ),
        "Decoder.admit": (world.admit, {"prompt_ids": [5, 6, 5], "sampling": short}),
        "Decoder.check": (world.decoder.check, {"prompt_ids": [5, 6, 5], "sampling": short}),
        "Decoder.retire": (world.decoder.retire, {"request_id": 5}),
        "Engine": (
            world.run_engine,
            {"decoder": lm.decoder(), "max_batch": None, "tokenizer": world.tokenizer, "optimism": 0.5},
        ),
        "Engine.submit": (world.submit, request),
        "Engine.cancel": (world.cancel, {"request": world.engine.submit([5, 6], short)}),
        "Engine.room_for": (world.engine.room_for, {"num_prompt_tokens": 5}),
        "Request": (dw.Request, {"id": 0, "prompt_ids": [5], "sampling": short, "tokenizer": world.tokenizer}),
        "Sampling": (dw.Sampling, sampling),
        "Sampling.check_vocabulary": (short.check_vocabulary, {"vocab_size": 300}),
        "Budget": (
            dw.Budget,
            {"depth": 5, "width": 1, "nodes": None, "paths": None, "children": "keyed", "rule": None},
        ),
        "DraftTree": (
            world.tree_of,
            {"tokens": torch.tensor([[5]]), "parents": torch.tensor([[-1]]), "vocab_size": 300},
        ),
        "DraftTree.from_lists": (world.from_lists, {"tokens": [[5, 6]], "parents": [[-1, 0]], "device": "cpu"}),
        "DraftTree.chain": (
            dw.DraftTree.chain,
            {"tokens": torch.tensor([[5, 6]]), "confidence": None, "draft_probs": None},
        ),
        "DraftTree.root": (dw.DraftTree.root, {"pending": torch.tensor([5])}),
        "Grammar": (dw.Grammar, {"kind": "regex", "source": "a+"}),
        "Grammar.json_schema": (dw.Grammar.json_schema, {"schema": {"type": "object"}}),
        "Grammar.regex": (dw.Grammar.regex, {"pattern": "a"}),
        "Grammar.lark": (dw.Grammar.lark, {"source": 'start: "a"'}),
        "TextStream": (
            world.text_stream,
            {
                "ids": [5, 6],
                "tokenizer": world.tokenizer,
                "prompt_ids": [5],
                "stop": (),
                "skip_special_tokens": True,
                "min_ids": 0,
            },
        ),
        "Target.check_prompt": (world.target.check_prompt, {"prompt_ids": [5, 6]}),
        "custom_generate": (
            world.custom,
            {
                "draft": "lookup",
                "budget": dw.Budget(2),
                "rule": "match",
                "lossless": True,
                "seed": None,
                "tokenizer": None,
                "seed_then": None,
                "stop_strings": None,
                "stream_to": None,
            },
        ),
        "register": (
            world.register,
            {
                "name": "mine",
                "path": "draftwing.methods.lookup:Lookup",
                "help": "mine",
                "needs": "nothing",
                "training": None,
            },
        ),
    }


@pytest.fixture(scope="module")
def world(folder_of, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "target"
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return World(add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300), path), chat_template=template))


@contextmanager
def ends(seconds: int, what: str) -> Iterator[None]:
    """Fail if the block does not end: far beyond what any call takes on a busy machine."""

    def fail(*_: Any) -> None:
        raise AssertionError(f"{what} hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def describe(name: str, options: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}: {dw.errors.shown(value)}' for key, value in options.items())})"
