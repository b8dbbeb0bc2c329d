"""Draw the picture in the README: a dialogue with the chat model in the colours of `draftwing chat`.

    python tools/chat_picture.py                       # docs/chat.svg, with the best draft
    python tools/chat_picture.py --draft lookup --out /tmp/chat.svg

The budget is fixed, so that the same model and draft give the same picture on every machine.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console

import draftwing as dw
from draftwing.cli.screen import Screen, text_of
from draftwing.dialogue import AnswerStep, Dialogue
from draftwing.models.catalogue import entry_of

ROOT = Path(__file__).parents[1]
CHAT_MODEL = "smollm2-135m-instruct"
QUESTIONS = (
    "Write a Python function that adds up the even numbers of a list.",
    "Now write one that adds up the odd numbers of a list.",
)


def picture(draft: str | None, questions: tuple[str, ...], budget: dw.Budget, max_tokens: int, width: int) -> str:
    """The SVG."""
    entry = entry_of(CHAT_MODEL)
    name = draft or (entry.best_head if entry is not None else None) or "lookup"
    dialogue = Dialogue(
        dw.load(CHAT_MODEL, draft=name, budget=budget), Path(name).name, dw.Sampling(max_tokens=max_tokens)
    )
    console = Console(
        file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor", width=width, highlight=False
    )
    screen = Screen(console)
    screen.legend(first=1)
    for question in questions:
        screen.note("")
        screen.prompt(f"> {question}\n")
        said: list[AnswerStep] = []
        answer = dialogue.ask(question, said.append)
        console.print(text_of(said))  # as a whole: a terminal folds long lines, a picture would cut them off
        screen.note(
            f"{len(answer.token_ids)} tokens in {answer.stats.num_forwards} forwards of the model | tau "
            f"{answer.stats.tau:.2f} | {dialogue.draft}"
        )
    svg = console.export_svg(title=f"draftwing chat --target {CHAT_MODEL}", unique_id="chat")
    # Pages show pictures without what these load from elsewhere; without them the reader's own monospace font is taken.
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", help="as in `draftwing chat`; the best one that comes with the model, else lookup")
    parser.add_argument("--question", action="append", help="repeatable")
    parser.add_argument("--depth", type=int, default=5, help="of the chains that are drafted")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=88, help="columns")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "chat.svg")
    args = parser.parse_args()
    questions = tuple(args.question or QUESTIONS)
    svg = picture(args.draft, questions, dw.Budget(args.depth), args.max_tokens, args.width)
    args.out.write_text(svg, encoding="utf-8")
    print(f"{args.out}: {len(svg) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
