"""Count what one default decode step enters: files, functions, calls across files, and lines of those functions.

    python benchmarks/step_trace.py [--json] [--show]

The shipped pair decodes greedily with the automatic budget and the CPU kernel if there is one, without detokenization.
Every ``Engine.step`` of a text is traced; the figures are those of the drafting step with the median number of
functions. A comprehension counts as part of its function.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import typer

import draftwing as dw
from draftwing.text.prompts import shipped_prompts

SOURCE = Path(dw.__file__).parent
COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


@dataclass
class Trace:
    """Functions of Draftwing that one call enters, and their calls."""

    entered: set[CodeType] = field(default_factory=set)
    crossings: set[tuple[CodeType, CodeType]] = field(default_factory=set)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(SOURCE)) or code.co_name in COMPREHENSIONS:
            return
        self.entered.add(code)
        caller = frame.f_back
        while caller is not None and (
            not caller.f_code.co_filename.startswith(str(SOURCE)) or caller.f_code.co_name in COMPREHENSIONS
        ):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            self.crossings.add((caller.f_code, code))

    @property
    def files(self) -> dict[str, list[str]]:
        """Group the functions by file."""
        found: dict[str, list[str]] = {}
        for code in self.entered:
            name = str(Path(code.co_filename).relative_to(SOURCE))
            found.setdefault(name, []).append(code.co_qualname)
        return {name: sorted(found[name]) for name in sorted(found)}

    @property
    def num_lines(self) -> int:
        """Count the lines of the functions."""
        spans = []
        for code in self.entered:
            lines = [line for _, _, line in code.co_lines() if line]
            spans.append(max(lines) - code.co_firstlineno + 1)
        return sum(spans)

    def figures(self) -> dict[str, int]:
        """Return the four numbers."""
        return {
            "files": len(self.files),
            "functions": len(self.entered),
            "calls across files": len(self.crossings),
            "lines": self.num_lines,
        }


def trace(num_steps: int = 200) -> list[Trace]:
    """Return the traces of streamed steps after 100 steps of warm-up: of those that drafted, or of all if none did."""
    lm, drafting, plain = dw.load(), list[Trace](), list[Trace]()
    engine, prompts = dw.Engine(lm.decoder(), max_batch=1), itertools.cycle(shipped_prompts())
    for number in range(10 * num_steps):
        if not engine.num_running:
            engine.submit(lm.encode(next(prompts)), dw.Sampling(max_tokens=200, ignore_eos=True))
        one = Trace()
        sys.setprofile(one)
        try:
            step = engine.step()
        finally:
            sys.setprofile(None)
        if number >= 100 and not any(row.finish_reason for row in step.rows):
            (drafting if step.tree.num_nodes > 1 else plain).append(one)
        if len(drafting) == num_steps:
            break
    return drafting or plain[:num_steps]


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Name the functions of the median step.")] = False,
) -> None:
    """Trace default streamed steps."""
    traces = sorted(trace(), key=lambda each: len(each.entered))
    median, worst = traces[(len(traces) - 1) // 2], traces[-1]
    if as_json:
        named = {"median": median, "worst": worst}
        print(json.dumps({name: {**one.figures(), "by_file": one.files} for name, one in named.items()}, indent=1))
        return
    for name, one in ((f"median of {len(traces)}", median), ("worst", worst)):
        print(f"{name}: " + ", ".join(f"{count} {title}" for title, count in one.figures().items()))
    if show:
        for name, functions in median.files.items():
            print(f"{name}: {', '.join(functions)}")


if __name__ == "__main__":
    typer.run(main)
