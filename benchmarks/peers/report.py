"""Turn recorded rounds into figures, a table, a chart and JSON."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.channel import Run
from peers.modes import BASELINE
from peers.rounds import Outcome

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Figures:
    """One mode's row.

    Attributes:
        failure: why it could not be measured in every round.
        rounds: the number of measured rounds.
        tokens_per_s: median over the rounds.
        over_own_plain, over_ours: median over the rounds of this mode's rate over that of its peer's baseline decoding,
            or of Draftwing's, in the same round.
        tau: tokens per forward of the target after the first tokens.
        as_own_plain, as_ours: number of prompts whose text in all rounds is that of the peer's baseline decoding in
            its first round, or Draftwing's.
    """

    peer: str
    mode: str
    failure: str | None
    rounds: int = 0
    tokens_per_s: float | None = None
    over_own_plain: float | None = None
    over_ours: float | None = None
    tau: float | None = None
    as_own_plain: int | None = None
    as_ours: int | None = None


def separates_prefill(outcomes: Sequence[Outcome]) -> bool:
    """Return True if every peer reports the time of its first tokens; else total time counts for all."""
    return all(run.first_seconds is not None for each in outcomes for runs in each.rounds for run in runs)


def rate(runs: Sequence[Run], decode_only: bool) -> float:
    """Return tokens per second over all prompts of a round."""
    if not decode_only:
        return sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)
    tokens = sum(len(run.token_ids) - (run.first_tokens or 0) for run in runs)
    return tokens / sum(run.seconds - (run.first_seconds or 0.0) for run in runs)


def tau_of(outcome: Outcome) -> float | None:
    runs = [run for each in outcome.rounds for run in each]
    forwards = [run.forwards for run in runs if run.forwards is not None]
    if len(forwards) < len(runs) or not sum(forwards):
        return None
    return sum(len(run.token_ids) - (run.first_tokens or 1) for run in runs) / sum(forwards)


def _ratio(outcome: Outcome, base: Outcome | None, decode_only: bool) -> float | None:
    pairs = zip(outcome.rounds, base.rounds if base else [], strict=False)  # one of them may have failed half-way
    ratios = [rate(own, decode_only) / rate(other, decode_only) for own, other in pairs]
    return statistics.median(ratios) if ratios else None


def _same(outcome: Outcome, base: Outcome | None) -> int | None:
    if base is None or not base.rounds or not outcome.rounds:
        return None
    texts = [run.token_ids for run in base.rounds[0]]
    return sum(all(runs[index].token_ids == text for runs in outcome.rounds) for index, text in enumerate(texts))


def figures_of(outcomes: Sequence[Outcome]) -> list[Figures]:
    """Compute a row for every mode, including failed ones."""
    decode_only = separates_prefill(outcomes)
    by_name = {str(each.mode): each for each in outcomes}
    found = []
    for each in outcomes:
        own, ours = by_name.get(f"{each.mode.peer}/plain"), by_name.get(BASELINE)
        rates = [rate(runs, decode_only) for runs in each.rounds]
        found.append(
            Figures(
                each.mode.peer,
                each.mode.name,
                each.failure,
                len(rates),
                statistics.median(rates) if rates else None,
                _ratio(each, own, decode_only),
                _ratio(each, ours, decode_only),
                tau_of(each) if rates else None,
                _same(each, own),
                _same(each, ours),
            )
        )
    return found


def notes_of(outcomes: Sequence[Outcome], precision: str, inflated: str | None) -> list[str]:
    """Return notes that explain the table."""
    notes = []
    if inflated:
        notes.append(f"NOT A REAL MODEL of its size. {inflated}")
    if separates_prefill(outcomes):
        notes.append("tokens/s: after the first tokens, so without the prompt's prefill; medians over the rounds")
    else:
        notes.append("tokens/s: of the whole run with the prompt's prefill, since a peer does not tell it apart")
    if precision == "fp32":
        notes.append("text as ours: where it differs, the peer's float32 sums have another order")
    else:
        notes.append(
            "each peer rounds in its own way, so its texts may differ from ours; what counts is whether drafts leave "
            "the peer's own text as it is"
        )
    return notes


def table_of(figures: Sequence[Figures], num_prompts: int, title: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column("peer")
    table.add_column("mode")
    for name in ("tokens/s", "over its plain", "over ours", "tau"):
        table.add_column(name, justify="right")
    table.add_column("text as its plain")
    table.add_column("text as ours")
    last = None
    for each in figures:
        if last is not None and each.peer != last:
            table.add_section()
        last = each.peer
        table.add_row(
            each.peer,
            each.mode,
            "not measured" if each.tokens_per_s is None else f"{each.tokens_per_s:.1f}",
            _number(each.over_own_plain, ".2f", "x"),
            _number(each.over_ours, ".2f", "x"),
            _number(each.tau, ".2f"),
            _count(each.as_own_plain, num_prompts),
            _count(each.as_ours, num_prompts),
        )
    return table


def _number(value: float | None, style: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{style}}{unit}"


def _count(value: int | None, total: int) -> str:
    return "-" if value is None else f"{value} of {total}"


def failures_of(figures: Sequence[Figures]) -> list[str]:
    """List failures; modes with the same reason share a line."""
    reasons: dict[str, list[str]] = {}
    for each in figures:
        if each.failure:
            half_way = f" after {each.rounds} round{'s' * (each.rounds > 1)}" if each.rounds else ""
            reasons.setdefault(each.failure, []).append(f"{each.peer}/{each.mode}{half_way}")
    return [f"failed: {', '.join(modes)}: {reason}" for reason, modes in reasons.items()]


def result_of(outcomes: Sequence[Outcome], about: dict[str, Any]) -> dict[str, Any]:
    """Return JSON values: ``about`` this run, the figures, and each round of each mode."""
    modes = []
    for outcome, figures in zip(outcomes, figures_of(outcomes), strict=True):
        rounds = [[asdict(run) for run in runs] for runs in outcome.rounds]
        for runs in rounds:
            for run in runs:
                run["num_tokens"] = len(run.pop("token_ids"))
        # ``rounds``: here they are themselves, in the place of their number.
        modes.append({**_rounded(asdict(figures)), **outcome.load, "rounds": _rounded(rounds)})
    return {**about, "prefill_left_out": separates_prefill(outcomes), "modes": modes}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def draw(figures: Sequence[Figures], title: str, note: str, out: Path) -> None:
    """Draw tokens per second, a bar for each mode in its peer's colour; failed modes are labelled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peers = list(dict.fromkeys(each.peer for each in figures))
    picture, axes = pyplot.subplots(figsize=(8, 0.34 * len(figures) + 1.4))
    for place, each in enumerate(figures):
        axes.barh(place, each.tokens_per_s or 0.0, color=f"C{peers.index(each.peer)}", height=0.7)
        told = "not measured" if each.tokens_per_s is None else f"{each.tokens_per_s:.1f}"
        ratio = (
            "" if each.over_own_plain is None or each.mode == "plain" else f"  ({each.over_own_plain:.2f}x its plain)"
        )
        axes.text(each.tokens_per_s or 0.0, place, f" {told}{ratio}", va="center", fontsize=8)
    axes.set_yticks(range(len(figures)), [f"{each.peer} {each.mode}" for each in figures], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel("\n".join(["tokens/s", *textwrap.wrap(note, 110)]), fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    picture.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(out, dpi=150)
    pyplot.close(picture)
