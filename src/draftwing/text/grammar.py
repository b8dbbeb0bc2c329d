"""Grammars that the output must follow: a JSON schema, any JSON object, a regular expression, a Lark grammar.

A ``Grammar`` is plain data. ``Grammars`` compiles it for one tokenizer with llguidance, which finds the allowed tokens
of a whole vocabulary in about ten microseconds and copies a parser in a few.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftwing.errors import ConfigError, TokenizerError, UnsupportedError, shown
from draftwing.text.tokenizer import Tokenizer

KINDS = ("json", "regex", "lark")
MAX_CHARACTERS = 1 << 18
MAX_LEVELS = 64  # nesting of a schema
# Whitespace between two parts of JSON: a few blanks, or one new line with its indentation. Without a bound, greedy
# decoding may write blanks forever.
SPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,48}"
# Limits on reading a grammar and finding one mask, far beyond what honest grammars need.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_MAX_COMPILED = 64  # grammars that are kept


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

    Raises:
        UnsupportedError: llguidance is not installed.
        TokenizerError: it cannot read this tokenizer.
        ConfigError: the target has no end token.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        try:
            import llguidance
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
            self._tokenizer = llguidance.LLTokenizer(source, n_vocab=rows, eos_token=list(eos_ids))
        except Exception as error:  # llguidance raises whatever its parts raise
            raise TokenizerError(
                f"{tokenizer.folder}: llguidance cannot read this tokenizer ({_first_line(error)}): decode without a "
                f"grammar"
            ) from error
        self._matcher, self._limits = llguidance.LLMatcher, llguidance.LLParserLimits(**LIMITS)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()

    def constraint(self, grammar: Grammar) -> Compiled:
        """Compile a grammar. Raises ConfigError if it cannot be read, describes nothing, or is too complex."""
        with self._lock:
            compiled = self._compiled.pop(grammar, None) or self._compile(grammar)
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled

    def _compile(self, grammar: Grammar) -> Compiled:
        new = self._matcher
        try:
            if grammar.kind == "json":
                source = new.grammar_from_json_schema(grammar.source, overrides={"whitespace_pattern": SPACE})
            else:
                source = (new.grammar_from_regex if grammar.kind == "regex" else new.grammar_from_lark)(grammar.source)
            matcher = new(self._tokenizer, source, log_level=0, limits=self._limits)
            problem = matcher.get_error()
            if not problem:
                matcher.compute_bitmask()  # now, not in the first step: it looks at the whole vocabulary
                problem = matcher.get_error()
        except Exception as error:  # llguidance raises whatever its parts raise
            problem = str(error) or repr(error)
        if problem:
            what = "JSON schema" if grammar.kind == "json" else f"{grammar.kind} grammar"
            raise ConfigError(f"the {what} cannot be followed: {_first_line(problem)}: correct or simplify it")
        return Compiled(matcher)


class Compiled:
    """A compiled grammar at a place in the text: both a ``Constraint`` and its ``State``."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._words: np.ndarray | None = None

    def allowed(self) -> np.ndarray:
        if self._words is None:
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype="<u4")
            if self._matcher.is_error():
                problem = _first_line(self._matcher.get_error())
                raise ConfigError(f"the text's grammar cannot be followed any further: {problem}: simplify it")
            self._words = words
        return self._words

    def take(self, token: int) -> None:
        self._words = None
        self._matcher.consume_token(token)

    def fork(self) -> Compiled:
        return Compiled(self._matcher.deep_copy())

    start = fork


def _first_line(problem: object) -> str:
    """Return the first line of an error of llguidance, which may be long and quote the grammar."""
    first = next((line.strip() for line in str(problem).splitlines() if line.strip()), repr(problem))
    return first if len(first) <= 160 else first[:157] + "..."
