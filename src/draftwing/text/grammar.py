"""Grammars that the output must follow: a JSON schema, any JSON object, a regular expression, a Lark grammar.

A ``Grammar`` is plain data. ``Grammars`` compiles it for one tokenizer with llguidance, which finds the allowed tokens
of a whole vocabulary in about ten microseconds and copies a parser in a few.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftwing.errors import ConfigError, TokenizerError, UnsupportedError, shown
from draftwing.text import grammar_compile
from draftwing.text.grammar_compile import compile_grammar, first_line, make_tokenizer
from draftwing.text.tokenizer import Tokenizer

KINDS = ("json", "regex", "lark")
MAX_CHARACTERS = 1 << 18
MAX_LEVELS = 64  # nesting of a schema
_MAX_COMPILED = 64  # grammars that are kept
_MAX_TRIALS = 4  # grammars that are compiled at once


@dataclass(frozen=True)
class Grammar:
    """A grammar for the output.

    Attributes:
        kind: ``json`` (a schema), ``regex`` or ``lark``.
        source: the schema as JSON, the regular expression (which matches the whole output), or the grammar, whose rule
            ``start`` derives the output.

    Raises:
        ConfigError: an unknown kind, or a source that is no text or too long.
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ConfigError(f"unknown kind of grammar {shown(self.kind)}: choose one of {', '.join(KINDS)}")
        if not isinstance(self.source, str) or not 0 < len(self.source) <= MAX_CHARACTERS:
            found = f"{len(self.source):,} characters" if isinstance(self.source, str) else shown(self.source)
            raise ConfigError(f"a grammar is a text of 1 to {MAX_CHARACTERS:,} characters, found {found}: shorten it")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Return a grammar of the JSON that a schema describes.

        Args:
            schema: a dict, or JSON.

        Raises:
            ConfigError: the schema is not JSON, nested too deep or too long.
        """
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(value, Mapping | bool):
                raise ConfigError(f"a JSON schema is an object or true or false, found {shown(value)}: write a dict")
            if is_deeper(value, MAX_LEVELS):
                raise ConfigError(f"the JSON schema is nested deeper than {MAX_LEVELS} levels: move parts to $defs")
            return cls("json", json.dumps(value, allow_nan=False))
        except ConfigError:
            raise
        except Exception as error:  # also what a class of the caller's raises
            raise ConfigError(f"the JSON schema is not JSON ({error}): give a dict of plain values") from error

    @classmethod
    def json_object(cls) -> Grammar:
        """Return a grammar of any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return a grammar of text that a regular expression matches as a whole (the syntax of Rust's ``regex``)."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """Return a context-free grammar in llguidance's variant of Lark; the output derives from its rule ``start``."""
        return cls("lark", source)


GrammarLike = Grammar | Mapping[str, Any] | str


def as_grammar(value: object) -> Grammar:
    """Make a ``Grammar`` of itself, a JSON schema as a dict, or ``"json"``. Raises ConfigError for anything else."""
    if isinstance(value, Grammar):
        return value
    if isinstance(value, Mapping):
        return Grammar.json_schema(value)
    if isinstance(value, str) and value == "json":
        return Grammar.json_object()
    raise ConfigError(
        f"grammar must be a Grammar, a JSON schema as a dict, or 'json', found {shown(value)}: write "
        f"Grammar.regex(...) or Grammar.lark(...) for other texts"
    )


def is_deeper(value: object, levels: int) -> bool:
    """Return True if lists and dicts are nested deeper; without recursion, which a hostile value could exhaust."""
    layer: list[Any] = [value]
    for _ in range(levels + 1):
        layer = [each for each in layer if isinstance(each, Mapping | list | tuple)]
        if not layer:
            return False
        layer = [child for each in layer for child in (each.values() if isinstance(each, Mapping) else each)]
    return True


class Grammars:
    """Compiles grammars for one target, and keeps the latest ones. Threads may share it.

    Args:
        tokenizer: the target's.
        vocab_size: the number of its logits.
        eos_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise UnsupportedError(
                "grammars need llguidance, which is not installed: pip install 'draftwing[grammar]'"
            ) from error
        if not eos_ids:
            raise ConfigError(
                "the target names no end token, with which a text that follows a grammar ends: put `eos_token_id` into "
                "its generation_config.json"
            )
        try:
            source = tokenizer.fast.to_str()
            rows = max(vocab_size, tokenizer.fast.get_vocab_size(with_added_tokens=True))
            self._tokenizer = make_tokenizer(source, rows, list(eos_ids))
        except Exception as error:  # llguidance raises whatever its parts raise
            raise TokenizerError(
                f"llguidance cannot read the model's tokenizer ({first_line(error)}): decode without a grammar"
            ) from error
        self._trials = _Trials(source, rows, list(eos_ids))
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()

    def constraint(self, grammar: Grammar) -> Compiled:
        """Compile a grammar. Raises ConfigError if it cannot be read, describes nothing, or is too complex."""
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
        if compiled is None:  # without the lock: others need not wait
            compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> Compiled:
        matcher, problem = None, self._trials.find_problem(grammar)
        if not problem:
            matcher, problem = compile_grammar(self._tokenizer, grammar.kind, grammar.source)
        if problem:
            what = "JSON schema" if grammar.kind == "json" else f"{grammar.kind} grammar"
            raise ConfigError(f"the {what} cannot be followed: {problem}: correct or simplify it")
        return Compiled(matcher)


class _Trials:
    """Processes that try grammars out, started when needed.

    Args:
        tokenizer: the arguments of ``make_tokenizer``.
    """

    def __init__(self, *tokenizer: Any) -> None:
        self._tokenizer, self._owner = json.dumps(tokenizer), os.getpid()
        self._slots = threading.BoundedSemaphore(_MAX_TRIALS)
        self._idle: list[subprocess.Popen[str]] = []
        weakref.finalize(self, _end_all, self._idle)

    def find_problem(self, grammar: Grammar) -> str:
        """Compile a grammar elsewhere. Return the error, or an empty string."""
        if self._owner != os.getpid():  # a fork: the processes are its parent's
            self._idle.clear()
            self._owner = os.getpid()
        with self._slots:
            process = self._take()
            reply = _ask(process, json.dumps([grammar.kind, grammar.source, grammar_compile.CPU_SECONDS]))
            if reply is None:
                _end_all([process])
                return "it is nested too deep or takes too long to compile"
            self._idle.append(process)
            return reply

    def _take(self) -> subprocess.Popen[str]:
        with suppress(IndexError):  # none is left
            while True:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
        command = [sys.executable, "-P", grammar_compile.__file__]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            is_ready = _ask(process, self._tokenizer) is not None
        except OSError:
            is_ready = False
        if not is_ready:
            raise UnsupportedError(
                f"grammars are compiled by another process first, but `{' '.join(command)}` does not start: run "
                f"Draftwing in an ordinary Python, or decode without a grammar"
            )
        return process


def _ask(process: subprocess.Popen[str], line: str) -> str | None:
    """Return the reply of a process to a line; None if it has ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except OSError:
        return None
    reply = process.stdout.readline()
    return str(json.loads(reply)) if reply else None


def _end_all(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # it has ended without reading everything
                pipe.close()
        process.wait()


class Compiled:
    """A compiled grammar at a place in the text: both a ``Constraint`` and its ``State``."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._words: np.ndarray | None = None

    def allowed(self) -> np.ndarray:
        if self._words is None:
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype="<u4")
            if self._matcher.is_error():
                problem = first_line(self._matcher.get_error())
                raise ConfigError(f"the text's grammar cannot be followed any further: {problem}: simplify it")
            self._words = words
        return self._words

    def take(self, token: int) -> None:
        self._words = None
        self._matcher.consume_token(token)

    def fork(self) -> Compiled:
        return Compiled(self._matcher.deep_copy())

    start = fork
