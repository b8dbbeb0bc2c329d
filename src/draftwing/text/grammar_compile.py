"""Compiles grammars with llguidance; run as a program, it tries them out.

llguidance recurses as deep as a grammar is nested. A grammar of a few thousand rules that lead from one to the next
overflows the stack, which ends the process, and others take minutes. So each grammar is compiled by another process
first, with a small stack and a limit of processor time; this process compiles only grammars that pass.

The program imports nothing of Draftwing, so that it starts fast. It reads lines of JSON: the arguments of its
tokenizer, then grammars. It replies to each with a line, and ends when its input does.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Any

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
# Bytes of stack for the trial, enough for schemas whose objects are nested 100 deep. Threads of a server have at least
# twice as much, so what passes here is safe there.
STACK_BYTES = 1 << 20
CPU_SECONDS = 2.0  # for the trial; schemas with 1,000 optional properties take a quarter of a second


def make_tokenizer(source: str, vocab_size: int, eos_ids: list[int]) -> Any:
    """Return llguidance's form of a tokenizer, from its JSON."""
    import llguidance

    return llguidance.LLTokenizer(source, n_vocab=vocab_size, eos_token=eos_ids)


def compile_grammar(tokenizer: Any, kind: str, source: str) -> tuple[Any, str]:
    """Compile a grammar.

    Returns:
        The matcher, and the first line of the error, which is empty if there is none.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = None
    try:
        if kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": SPACE})
        else:
            grammar = (LLMatcher.grammar_from_regex if kind == "regex" else LLMatcher.grammar_from_lark)(source)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # now, not in the first step: it looks at the whole vocabulary
        problem = first_line(matcher.get_error()) if matcher.is_error() else ""
    except Exception as error:  # llguidance raises whatever its parts raise
        problem = first_line(error)
    return matcher, problem


def first_line(problem: object) -> str:
    """Return the first line of an error of llguidance, which may be long and quote the grammar."""
    first = next((line.strip() for line in str(problem).splitlines() if line.strip()), repr(problem))
    return first if len(first) <= 160 else first[:157] + "..."


def _serve() -> None:
    tokenizer = make_tokenizer(*json.loads(sys.stdin.readline()))
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        kind, source, seconds = json.loads(line)
        if hasattr(signal, "setitimer"):  # not on Windows
            signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time, after which the process ends
        _, problem = compile_grammar(tokenizer, kind, source)
        print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # the process ends with the one that started it, not before
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "win32":
        import resource

        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, even if the one before ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected here
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_serve).start()
