"""Every public callable with hostile values: it works or refuses by name, and what it was called on still works."""

from __future__ import annotations

import asyncio
import collections
import decimal
import fractions
import itertools
import json
import os
import random
import shutil
import signal
import threading
import warnings
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
from conftest import add_tokenizer, build, check_engine
from draftwing.errors import DraftwingError, shown
from draftwing.formats.settings import is_head_config, read_settings
from draftwing.formats.write import write_head
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.methods.registry import METHODS
from draftwing.models.config import ModelConfig, read_config
from draftwing.serve.convert import Defaults

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


PLAIN = [
    *(None, True, False, 0, -1, 1, 5, 299, 2**31, 2**63, -(2**63), 10**400, 10**5000, 0.5, -0.0, 1.5, 1e300, 1j),
    *(float("nan"), float("inf"), decimal.Decimal("1.5"), fractions.Fraction(1, 3), ..., NotImplemented, slice(5)),
    *("", "x", "0", "match", "json", "none", "cpu", "\ud83d", "\0", "a\0b", "x" * 300, "y" * 100_000, "/dev/null"),
    *("../..", "a+b", "+", b"", b"ab", bytearray(b"ab"), memoryview(b"ab"), Path("x"), Path("x" * 300), Path("\0")),
    *((), [], {}, [1], [5, 6], [True], [1.5], ["x"], [None], [[]], [[1]], [[5, 6], [5]], [[[1]]], [10**400], [-1]),
    *((1, 2), ("x", "x"), {5, 6}, frozenset(), range(5), range(0), range(10**9), {1: 2}, {"a": 1}, {5: float("nan")}),
    *({"role": "user", "content": "x"}, [{"role": "user", "content": 3}], {"type": {"type": {}}}, ValueError("x")),
    *(object, int, len, print, object(), collections.Counter("ab"), collections.UserList([5])),
    *(MappingProxyType({"a": 1}), torch.device("meta"), SimpleNamespace(ndim=1, tolist=lambda: 3)),
    *(np.int64(5), np.float32(0.5), np.bool_(True), np.datetime64("2020"), np.array(5), np.array([5, 6]), np.array([])),
    *(np.array(["x"]), np.array([None, 5]), np.array([[1, 2], [3, 4]]), np.array([1.5]), np.array([True])),
    *(torch.tensor(5), torch.tensor([5, 6]), torch.tensor([]), torch.tensor([[5, 6], [7, 8]]), torch.tensor([1.5])),
    *(torch.tensor([True]), torch.empty(2, device="meta"), torch.zeros(1).to_sparse(), torch.float32),
]
RUDE = [(name,) for name in ("repr", "iter", "bool", "len", "eq", "hash", "getitem", "float", "index")]
POOL: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in PLAIN),
    *(lambda names=names: Rude(*names) for names in [(), *RUDE]),
    *(lambda: RudeInt(5), lambda: RudeText("x"), lambda: RudeList([1]), lambda: RudeDict(a=1), itself, nested),
    *(generator, itertools.count, lambda: iter([5]), threading.Lock, MagicMock, lambda: lambda *_, **__: 5),
    *(Starts, StartsBadly, Stateful, lambda: Stateful(5), lambda: Stateful(np.zeros(3))),
    *(lambda: Stateful(np.zeros(10, np.uint32)), dw.Sampling, lambda: dw.Budget(2), lambda: dw.Grammar.regex("a+")),
]


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

    def custom(self, seed_then: Any, stop_strings: Any, **options: Any) -> None:
        fast = dw.custom_generate(**options)
        more = {"stop_strings": stop_strings, "seed": seed_then}
        self.model.generate(torch.tensor([[5, 6, 5]]), custom_generate=fast, max_new_tokens=2, **more)

    def register(self, **options: Any) -> None:
        before = dict(METHODS)
        try:
            dw.register(**options)
            method = METHODS[options["name"]].method
            assert method.name == options["name"]
        finally:
            METHODS.clear()
            METHODS.update(before)


def calls(world: World) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public callables by name, with valid arguments."""
    lm, short = world.lm, dw.Sampling(max_tokens=3)
    limits = {"speculation": None, "references": (), "grammar": None}
    sampling = dict(vars(short))
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


CALLBACKS = {"new_drafter", "drafter", "draft", "on_step"}  # exceptions of these callables reach the caller


@contextmanager
def ends(what: str, seconds: int = 60) -> Iterator[None]:
    """Fail if the block does not end. The limit is far beyond what a call takes on a busy machine."""

    def fail(*_: Any) -> None:
        pytest.fail(f"{what} does not end")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def works_or_refuses(what: str) -> Iterator[None]:
    """Nothing but our errors, with a message that can be read and printed, and in bounded time."""
    with warnings.catch_warnings(), ends(what):
        warnings.simplefilter("ignore")
        try:
            yield
        except DraftwingError as error:
            message = str(error)
            assert message, what
            assert len(message) < 1500, what
            message.encode("utf-8", "backslashreplace")
        except Exception as error:
            raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error


@pytest.fixture(scope="module")
def world(folder_of, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "target"
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return World(
        add_tokenizer(shutil.copytree(folder_of("llama", vocab_size=300, head_dim=32), path), chat_template=template)
    )


def text_of(world: World) -> list[int]:
    request = world.engine.submit([5, 6, 5, 6], dw.Sampling(max_tokens=4))
    world.engine.run()
    return request.token_ids


def test_the_valid_arguments_are_valid(world):
    for name, (call, valid) in calls(world).items():
        if name != "Decoder.retire":  # no request runs
            call(**valid)


@pytest.mark.parametrize(("seed", "count"), [(0, 1500), pytest.param(1, 10_000, marks=pytest.mark.full)])
def test_every_public_callable(world, seed, count):
    """Each call has one to three hostile arguments; the objects that it was made on are whole afterwards."""
    rng, table, wanted = random.Random(seed), calls(world), text_of(world)
    for number in range(count):
        name = list(table)[number % len(table)]
        call, valid = table[name]
        options = dict(valid)
        for parameter in rng.sample(list(valid), min(len(valid), rng.choice([1, 1, 1, 2, 3]))):
            value = rng.choice(POOL)()
            if not (parameter in CALLBACKS and callable(value)):
                options[parameter] = value
        with works_or_refuses(f"call {number}: {describe(name, options)}"):
            call(**options)
        if number % 100 == 0:
            assert text_of(world) == wanted, describe(name, options)
    check_engine(world.engine)
    check_engine(world.paged)


def describe(name: str, options: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={shown(value)}' for key, value in options.items())})"


# --- damaged files ---------------------------------------------------------------------------------------------------

VALUES = [None, True, -1, 0, 5, 2**31, 10**400, 1.5, 1e300, float("nan"), float("inf"), "", "x", "\ud83d", [], [1], {}]
VALUES += [{"a": 1}, [[]], ["x"], [True]]
CONTENTS = ["", "null", "5", "[]", "{}", '"x"', "{", "[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "NaN", "\0" * 9]


def replace_value(value: Any, rng: random.Random) -> Any:
    """Replace, remove or keep values somewhere in a JSON value."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice(VALUES)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if rng.random() < 0.1:
        del value[key]
    else:
        value[key] = replace_value(value[key], rng)
    return value


def damage(file: Path, rng: random.Random) -> str:
    """Damage a file in a random way; returns a description."""
    content = bytearray(file.read_bytes())
    how = rng.choice(["cut", "bytes", "content", "pipe", "folder", "remove", *["value"] * 6])
    if how == "cut":
        file.write_bytes(content[: rng.randrange(len(content))])
    elif how == "bytes":
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(min(len(content), 4000))] = rng.randrange(256)
        file.write_bytes(content)
    elif how == "content":
        file.write_text(rng.choice(CONTENTS))
    elif how == "value" and file.suffix == ".json":
        file.write_text(json.dumps(replace_value(json.loads(content), rng)))
    elif how == "value":  # in the header of safetensors
        size = int.from_bytes(content[:8], "little")
        header = json.dumps(replace_value(json.loads(content[8 : 8 + size]), rng)).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    else:
        file.unlink()
        if how == "pipe":
            os.mkfifo(file)
        elif how == "folder":
            file.mkdir()
    return f"{file.parent.name}/{file.name}, {how}"


@pytest.fixture(scope="module")
def pair(world, tmp_path_factory):
    """A target and an EAGLE-3 head for it."""
    folder = tmp_path_factory.mktemp("pair")
    shutil.copytree(world.folder, folder / "target")
    (folder / "target" / "generation_config.json").write_text('{"eos_token_id": [2, 5], "temperature": 0.5}')
    config = EagleConfig.for_target(3, ModelConfig.from_hf(read_config(world.folder)))
    write_head(folder / "head", EagleNet(config, world.target.embedding.plain(), world.target.head))
    return folder


# Keys of foreign heads, with values that are right.
FOREIGN = {
    "architectures": ["LlamaForCausalLMEagle3"], "layer_types": ["full_attention"], "sliding_window": None,
    "rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "quantization_config": None, "truncated_vocab_size": None, "use_sliding_window": None, "draft_vocab_size": 10,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "num_hidden_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize("layout", ["ours", "eagle", "speculators"])
def test_every_value_of_a_heads_config(pair, layout):
    config = json.loads((pair / "head" / "config.json").read_text()) | FOREIGN
    if layout != "ours":
        del config["draftwing"]
    for key in [*config, "draftwing", "speculators_model_type", "speculators_config", "dflash_config", "model_type"]:
        for value in [*VALUES, [["x"]], [{}]]:
            damaged = {**config, key: value}
            if layout == "speculators":
                damaged = {"speculators_model_type": "eagle3", "transformer_layer_config": damaged, key: value}
            for read in (is_head_config, lambda config: read_settings(config, "w"), ModelConfig.from_hf):
                with works_or_refuses(f"{key}: {value!r:.40}"):
                    read(damaged)


@pytest.mark.parametrize(("seed", "count"), [(0, 40), pytest.param(1, 500, marks=pytest.mark.full)])
def test_damaged_files(pair, tmp_path, seed, count):
    rng = random.Random(seed)
    names = sorted(str(file.relative_to(pair)) for file in pair.rglob("*.*") if file.is_file())
    names = [name for name in names if name.endswith((".json", ".safetensors"))]
    for number in range(count):
        folder = shutil.copytree(pair, tmp_path / str(number))
        what = damage(folder / names[number % len(names)], rng)
        with works_or_refuses(f"file {number}: {what}"):
            lm = dw.load(folder / "target", folder / "head", budget=dw.Budget(2))
            lm.generate([[5, 6, 5]], max_tokens=2)
            Defaults.for_model(lm, lm.engine())
            lm.generate([[{"role": "user", "content": "x"}]], max_tokens=2)
        shutil.rmtree(folder)
