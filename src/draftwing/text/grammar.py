"""Grammars that a text must follow: a JSON schema, any JSON object, a regular expression, a grammar in Lark's notation.

A ``Grammar`` is plain data. ``Grammars`` makes constraints of them, for one tokenizer, by llguidance: which tokens may
come next is found among all of a vocabulary in some ten microseconds, and a parser is forked in a few.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftwing.constraint import State
from draftwing.errors import ConfigError, TokenizerError, UnsupportedError, shown
from draftwing.text.tokenizer import Tokenizer

KINDS = ("json", "regex", "lark")
LONGEST = 1 << 18  # characters of a grammar
DEEPEST = 64  # levels of a schema
# Between two parts of a JSON text: a few blanks, or one new line with its indentation. Unbounded, a model that is
# greedy may write blanks for ever.
SPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,48}"
# What reading a grammar and finding one mask may take; far beyond what honest grammars need.
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
KEPT = 64  # compiled grammars


@dataclass(frozen=True)
class Grammar:
    """What a text must follow.

    Attributes:
        kind: ``json`` (a schema), ``regex`` or ``lark``.
        source: the schema as JSON, the regular expression (which the whole text matches), or the grammar, whose rule
            ``start`` the text follows.

    Raises:
        ConfigError: an unknown kind, or a source that is no text or too long.
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"unknown kind of grammar {shown(self.kind)}: choose one of {', '.join(KINDS)}")
        if not isinstance(self.source, str) or not 0 < len(self.source) <= LONGEST:
            found = f"{len(self.source):,} characters" if isinstance(self.source, str) else shown(self.source)
            raise ConfigError(f"a grammar is a text of 1 to {LONGEST:,} characters, found {found}: shorten it")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON that a schema describes, given as a dict or as JSON.

        Raises:
            ConfigError: it is no JSON, nested too deep or too long.
        """
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(found, Mapping | bool):
                raise ConfigError(f"a JSON schema is an object or true or false, found {shown(found)}: write a dict")
            if is_deeper(found, DEEPEST):
                raise ConfigError(f"the JSON schema is nested deeper than {DEEPEST} levels: move parts of it to $defs")
            return cls("json", json.dumps(found, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the JSON schema is not JSON ({error}): give a dict of plain values") from error

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole (the syntax of Rust's ``regex``)."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """Text that a context-free grammar derives from its rule ``start``, in Lark's notation as llguidance has it."""
        return cls("lark", source)


GrammarLike = Grammar | Mapping[str, Any] | str


def as_grammar(given: object) -> Grammar:
    """A grammar as users give it: a ``Grammar``, a dict that is a JSON schema, or ``"json"`` for any JSON object.

    Raises:
        ConfigError: something else.
    """
    if isinstance(given, Grammar):
        return given
    if isinstance(given, Mapping):
        return Grammar.json_schema(given)
    if isinstance(given, str) and given == "json":
        return Grammar.json_object()
    raise ConfigError(
        f"grammar must be a Grammar, a JSON schema as a dict, or 'json', found {shown(given)}: write "
        f"Grammar.regex(...) or Grammar.lark(...) for other texts"
    )


def is_deeper(value: object, levels: int) -> bool:
    """Whether lists and dicts are nested deeper, found without recursion: a hostile one would end that."""
    layer: list[object] = [value]
    for _ in range(levels):
        layer = [
            each
            for one in layer
            if isinstance(one, Mapping | list | tuple)
            for each in (one.values() if isinstance(one, Mapping) else one)
        ]
        if not layer:
            return False
    return any(isinstance(each, Mapping | list | tuple) for each in layer)


class Grammars:
    """Makes constraints for one target; what it has made is kept for the next request. Threads may share it.

    Args:
        tokenizer: the target's.
        vocab_size: of its logits.
        eos_ids: tokens that end a text.

    Raises:
        UnsupportedError: llguidance is not installed.
        TokenizerError: it cannot read this tokenizer.
        ConfigError: the target has no end token.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._guidance = _guidance()
        if not eos_ids:
            raise ConfigError(
                "the target names no end token, with which a text that follows a grammar ends: put `eos_token_id` into "
                "its generation_config.json"
            )
        try:
            source = tokenizer.fast.to_str()
            rows = max(vocab_size, tokenizer.fast.get_vocab_size(with_added_tokens=True))
            self._tokenizer = self._guidance.LLTokenizer(source, n_vocab=rows, eos_token=list(eos_ids))
        except Exception as error:  # llguidance raises whatever its parts do
            raise TokenizerError(
                f"{tokenizer.folder}: llguidance cannot read this tokenizer ({_short(error)}): decode without a grammar"
            ) from error
        self._limits = self._guidance.LLParserLimits(**LIMITS)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()

    def constraint(self, grammar: Grammar) -> Compiled:
        """The constraint of a grammar.

        Raises:
            ConfigError: it cannot be read, describes nothing, or is too complex.
        """
        with self._lock:
            found = self._kept.pop(grammar, None)
            if found is None:
                found = self._compile(grammar)
            self._kept[grammar] = found
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return found

    def _compile(self, grammar: Grammar) -> Compiled:
        matcher = self._guidance.LLMatcher
        try:
            if grammar.kind == "json":
                source = matcher.grammar_from_json_schema(grammar.source, overrides={"whitespace_pattern": SPACE})
            elif grammar.kind == "regex":
                source = matcher.grammar_from_regex(grammar.source)
            else:
                source = matcher.grammar_from_lark(grammar.source)
            first = matcher(self._tokenizer, source, log_level=0, limits=self._limits)
            problem = first.get_error()
            if not problem:
                first.compute_bitmask()  # here, not in the first step: it looks at the whole vocabulary
                problem = first.get_error()
        except Exception as error:  # llguidance raises whatever its parts do
            problem = str(error) or repr(error)
        if problem:
            what = "JSON schema" if grammar.kind == "json" else f"{grammar.kind} grammar"
            raise ConfigError(f"the {what} cannot be followed: {_short(problem)}: correct or simplify it")
        return Compiled(first)


class Compiled:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> State:
        return _State(self._matcher.deep_copy())


class _State:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._words: np.ndarray | None = None

    def allowed(self) -> np.ndarray:
        if self._words is None:
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype="<u4")
            if self._matcher.is_error():
                raise ConfigError(
                    f"the text's grammar cannot be followed any further: {_short(self._matcher.get_error())}: simplify "
                    f"it"
                )
            self._words = words
        return self._words

    def take(self, token: int) -> None:
        self._words = None
        self._matcher.consume_token(token)

    def fork(self) -> State:
        return _State(self._matcher.deep_copy())


def _guidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedError(
            "grammars need llguidance, which is not installed: pip install 'draftwing[grammar]'"
        ) from error
    return llguidance


def _short(problem: object) -> str:
    """The first line of what llguidance says, which may be long and quote the grammar."""
    first = next((line.strip() for line in str(problem).splitlines() if line.strip()), repr(problem))
    return first if len(first) <= 160 else first[:157] + "..."
