"""Which drafts a command may be given, and what its help says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwing.drafters.kinds import KINDS
from draftwing.errors import ConfigError, DraftwingError
from draftwing.model.catalogue import entry_of

if TYPE_CHECKING:
    from draftwing.api import LM
    from draftwing.drafters.kind import NewDrafter

__all__ = [
    "AllDrafts",
    "Compared",
    "Draft",
    "Drafts",
    "drafts_at_hand",
    "drafts_compared",
    "every_draft",
    "head_folder",
    "or_of",
]


def or_of(names: Iterable[str]) -> str:
    """``a, b or c``."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _shipped(target: str | None) -> list[str]:
    """The kinds of the drafts that come with Draftwing for a target."""
    entry = entry_of(target)
    return [name for name in KINDS if entry is not None and name in entry.heads]


def drafts_at_hand(target: str | None) -> list[str]:
    """The drafts that need no path: those that suit any target, and those that come with Draftwing for this one."""
    return [*_NAMED, *_shipped(target)]


def drafts_compared(target: str | None) -> list[str]:
    """The drafts that are measured where none is named: as the help of ``Drafts`` says."""
    return ["lookup", *_shipped(target)]


def every_draft(
    plain: LM, target: str | None, device: str | None, but: Sequence[str] = ()
) -> list[tuple[str, NewDrafter]]:
    """Name and maker of every draft that needs no path; what the target of ``plain`` cannot have is left out aloud.

    Args:
        target, device: as the command line has them.
        but: those that are there already.
    """
    from draftwing.api import load_drafter
    from draftwing.cli import screen

    brought = [kind.name for kind in KINDS.values() if kind.of_target is not None]
    entry = entry_of(target)
    joined = [] if entry is None or entry.best_head is None else [f"{entry.best_head}+lookup"]
    found = []
    for name in [*drafts_at_hand(target), *joined, *brought]:
        if name == "none" or name in but:
            continue
        try:
            found.append((name, load_drafter(name, plain.target, plain.tokenizer, device=device)))
        except DraftwingError as error:
            screen.line(f"left out: {name}: {error}", "yellow")
    return found


def head_folder(target: str | None, draft: str | None) -> Path:
    """Of a head as the command line has it, found without loading the target.

    Raises:
        ConfigError: a draft without a head's statistics.
    """
    from draftwing.model.resolve import resolve

    entry = entry_of(target)
    draft = draft or (entry.best_head if entry is not None else None)
    kind = KINDS.get(str(draft))
    folder: Path | None = None
    if entry is not None and draft is not None and draft in entry.heads:
        folder = entry.head(draft)
    elif draft is not None and (kind is None or (kind.recognises is not None and kind.of_target is None)):
        folder = resolve(draft)
    if folder is None:
        raise ConfigError(
            f"a forecast is made from a head's held-out statistics, and {draft or 'lookup'} has none: give a head with "
            f"--draft, or measure with `draftwing compare` or --formulas"
        )
    return folder


_NAMED = [kind.name for kind in KINDS.values() if kind.recognises is None]
_FOLDERS = [kind.help for kind in KINDS.values() if kind.recognises is not None]
_OWN = [f"{kind.name} (the target's own)" for kind in KINDS.values() if kind.of_target is not None]
_DRAFTS = (
    f"{', '.join([*(f'{name} ({KINDS[name].help})' for name in _NAMED), *_OWN])}, or a folder, name or hub id of "
    f"{or_of(_FOLDERS)}; for the shipped target {or_of(_shipped(None))} too. Several at once: eagle3+lookup."
)
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help=f"{_DRAFTS} [default: what comes with Draftwing for the target (eagle3 for the shipped one), else lookup]",
    ),
]
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        "-d",
        help=f"{_DRAFTS} Repeatable. [default: lookup, and all that come with Draftwing for the target]",
    ),
]


AllDrafts = Annotated[
    bool, typer.Option("--all", help="Beside these every draft that needs no path, and that this target can have.")
]


@dataclasses.dataclass(frozen=True)
class Compared:
    """The drafts that are measured side by side."""

    draft: Drafts = None
    every: AllDrafts = False
