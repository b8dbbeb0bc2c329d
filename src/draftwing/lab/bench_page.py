"""Plots as SVG that takes its colours from the page around it: bars with intervals, and lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from draftwing.lab.bench_results import MEAN, Estimate, Group, Row

_ROW, _GAP, _TOP = 17, 12, 22  # pixels
_PLOT, _VALUES = 440, 130
_LETTER = 6.8  # pixels of one, on average
NUM_COLOURS = 8


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        value, low, high: of which the ends of the interval may be None.
        colour: a number; bars of one method have the same.
        shade: 0 is full, higher ones are fainter.
    """

    label: str
    value: float
    low: float | None
    high: float | None
    colour: int
    shade: int = 0


@dataclass(frozen=True)
class Line:
    """One line through the points (1, values[0]), (2, values[1]), ..."""

    label: str
    values: Sequence[float]
    colour: int
    shade: int = 0


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], unit: str = "", reference: float | None = None) -> str:
    """Horizontal bars from 0 on, group under group, with whiskers for the intervals.

    Args:
        unit: after each value.
        reference: where a line is drawn through all.
    """
    every = [each for _, group in groups for each in group]
    most = max((max(each.value, each.high or 0.0) for each in every), default=1.0)
    step = _step(max(most, reference or 0.0))
    left = min(max(180.0, 12 + _LETTER * max((len(each.label) for each in every), default=0)), 460.0)
    scale = _PLOT / (step * _whole(max(most, reference or 0.0) / step))
    height = _TOP + sum(_ROW * (len(group) + 1) + _GAP for _, group in groups)
    parts = [_grid(step, scale, height, unit)]
    if reference is not None:
        x = reference * scale
        parts.append(f'<line class="reference" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{height - _GAP}"/>')
    y = float(_TOP)
    for name, group in groups:
        parts.append(f'<text class="head" x="{-left:.0f}" y="{y + 12:.0f}">{escape(name)}</text>')
        y += _ROW
        for each in group:
            parts.append(_bar(each, y, scale, unit))
            y += _ROW
        y += _GAP
    return _svg(left + _PLOT + _VALUES, height, parts, -left)


def _bar(bar: Bar, y: float, scale: float, unit: str) -> str:
    middle, value = y + _ROW / 2, f"{bar.value:.2f}{unit}"
    if bar.low is not None and bar.high is not None:
        value += f" [{bar.low:.2f}, {bar.high:.2f}]"
    found = (
        f'<text class="label" x="-6" y="{middle + 4:.1f}">{escape(bar.label)}</text>'
        f'<rect class="c{bar.colour % NUM_COLOURS} s{min(bar.shade, 2)}" x="0" y="{y + 3:.1f}" '
        f'width="{bar.value * scale:.1f}" height="{_ROW - 6}"><title>{escape(f"{bar.label}: {value}")}</title></rect>'
    )
    right = bar.value * scale
    if bar.low is not None and bar.high is not None:
        left, right = bar.low * scale, max(bar.high * scale, right)
        ends = f'x1="{left:.1f}" x2="{bar.high * scale:.1f}"'
        found += f'<line class="whisker" {ends} y1="{middle:.1f}" y2="{middle:.1f}"/>'
    return found + f'<text x="{right + 6:.1f}" y="{middle + 4:.1f}">{escape(value)}</text>'


def _grid(step: float, scale: float, height: float, unit: str) -> str:
    found = ""
    for number in range(_whole(_PLOT / scale / step) + 1):
        x = number * step * scale
        found += f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{height - _GAP}"/>'
        found += f'<text class="tick" x="{x:.1f}" y="{_TOP - 9}">{number * step:g}{escape(unit)}</text>'
    return found


def lines(title: str, series: Sequence[Line], size: tuple[int, int] = (330, 190)) -> str:
    """Shares from 0 to 1 by depth: a small plot without a legend."""
    width, height = size
    left, bottom, top = 34, height - 26, 24
    most = max((len(each.values) for each in series), default=1)
    across = (width - left - 12) / max(most - 1, 1)
    parts = [f'<text class="head" x="0" y="12">{escape(title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * (bottom - top)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="label" x="{left - 5}" y="{y + 4:.1f}">{share:g}</text>')
    for number in range(0, most, 1 + most // 12):
        parts.append(f'<text class="tick" x="{left + number * across:.1f}" y="{bottom + 15}">{number + 1}</text>')
    for each in series:
        points = [(left + n * across, bottom - value * (bottom - top)) for n, value in enumerate(each.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        kind = f"c{each.colour % NUM_COLOURS} s{min(each.shade, 2)}"
        parts.append(f'<polyline class="{kind}" points="{path}"><title>{escape(each.label)}</title></polyline>')
        for (x, y), value in zip(points, each.values, strict=True):
            hint = escape(f"{each.label}: {value:.2f}")
            parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"><title>{hint}</title></circle>')
    return _svg(width, height, parts)


def _svg(width: float, height: float, parts: Sequence[str], left: float = 0) -> str:
    return (
        f'<svg viewBox="{left:.0f} 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _whole(ratio: float) -> int:
    return max(1, -int(-ratio // 1) if abs(ratio - round(ratio)) > 1e-9 else round(ratio))


def _step(most: float) -> float:
    """A round distance between grid lines, of which about five go up to ``most``."""
    return next(step for step in (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 1e3, 1e9) if most / step <= 6)


# One page of HTML that needs nothing else: figures, plots, texts that differ, machine and settings.


_OFTEN = 10  # times that a depth was reached, to be in a plot
# Of blue, orange, green, ...: told apart by colour-blind readers too (after Okabe and Ito), on white and on black.
_LIGHT = ("#0067a5", "#d55e00", "#00805f", "#a0457e", "#8a6d00", "#3f8fc4", "#555555", "#b00020")
_DARK = ("#5ab4f0", "#ff9a4d", "#3fd0a3", "#e58cc0", "#e0c04a", "#9cd0f5", "#bbbbbb", "#ff7b88")
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --faint: #d9d9d9; --soft: #5c5c5c; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181a; --faint: #3a3d40; --soft: #a6a6a6; DARK } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1080px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2.2em; border-top: 1px solid var(--faint);
  padding-top: 1em; } h3 { font-size: 1em; margin: 1.8em 0 .4em; }
p.note { color: var(--soft); margin: .3em 0; max-width: 56em; }
div.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 2px 9px; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th.l, td.l { text-align: left; } td small { color: var(--soft); } td.bad { color: var(--c7); font-weight: 600; }
tr.mean td { font-weight: 600; } svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
svg .label { text-anchor: end; fill: var(--soft); }
svg .tick { text-anchor: middle; fill: var(--soft); }
svg .head { font-weight: 600; } svg .grid { stroke: var(--faint); } svg .whisker { stroke: var(--ink); }
svg .reference { stroke: var(--ink); stroke-dasharray: 4 3; } svg polyline { stroke-width: 1.8; }
svg .s1 { opacity: .6; } svg .s2 { opacity: .35; } svg polyline.s1 { stroke-dasharray: 5 3; opacity: 1; }
svg polyline.s2 { stroke-dasharray: 1.5 3; opacity: 1; } details { margin: .4em 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; background: color-mix(in srgb, var(--faint) 35%, transparent); padding: .6em; }
span.key { display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 1em; vertical-align: -.05em; }
"""


def render(groups: Sequence[Group], title: str = "draftwing bench") -> str:
    """The page."""
    body = "".join(_group(each) for each in groups)
    several = (
        '<p class="note">What was measured with other settings, or on another machine, stands in a part of its own: '
        "figures of different parts do not compare.</p>"
        if len(groups) > 1
        else ""
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_styles()}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>{several}{body}</body></html>\n"
    )


def _styles() -> str:
    def named(colours: Sequence[str]) -> str:
        return " ".join(f"--c{n}: {colour};" for n, colour in enumerate(colours))

    kinds = "".join(
        f"svg .c{n} {{ fill: var(--c{n}); stroke: none; }} svg polyline.c{n} {{ fill: none; stroke: var(--c{n}); }} "
        f"span.c{n} {{ background: var(--c{n}); }}\n"
        for n in range(NUM_COLOURS)
    )
    return _STYLE.replace("LIGHT", named(_LIGHT)).replace("DARK", named(_DARK)) + kinds


# --- text of figures -------------------------------------------------------------------------------------------------


def label_of(method: Mapping[str, Any]) -> str:
    """Such as ``eagle3, chain:5``; with the rule, where it is not the usual one."""
    rule = "" if method["rule"] == "match" else f", {method['rule']}"
    return f"{method['draft']}, {method['budget']}{rule}"


def span(estimate: Estimate, unit: str = "") -> tuple[str, str]:
    """A figure, and its interval as ``1.52-1.71``; empty where there is none."""
    ends = "" if estimate.low is None or estimate.high is None else f"{estimate.low:.2f}-{estimate.high:.2f}"
    return f"{estimate.value:.2f}{unit}", ends


# --- a group ---------------------------------------------------------------------------------------------------------


def _group(group: Group) -> str:
    s = group.settings
    model = f"{s['target']}, {s['dtype']}" + ("" if s["quantize"] == "none" else f", {s['quantize']}")
    parts = [f"<h2>{escape(model)}, {escape(_place(s))}</h2>", _summary(group), _legend(group)]
    parts += [_plots(group), "<h3>By set</h3>", _table(group.wholes)]
    if group.parts:
        parts += ["<h3>By turn and category</h3>", _table(group.parts, parts=True)]
    parts += [_differences(group), _skipped(group), _settings(group)]
    return "".join(parts)


def _place(settings: Mapping[str, Any]) -> str:
    machine = settings["machine"]
    if str(settings["device"]).startswith("cuda"):
        return str(machine["gpu"])
    return f"{machine['cpu']}, {machine['threads']} threads"


def _summary(group: Group) -> str:
    """What came out, in a sentence for each method: over all sets where there are several."""
    whole = [row for row in group.wholes if row.set == MEAN] or group.wholes
    lines_ = []
    for row in whole:
        value, ends = span(row.figures["speedup"], "x")
        where = "the mean of all sets" if row.set == MEAN else row.set
        lines_.append(
            f"<li>{escape(label_of(row.method))}: <b>{value}</b>{f' ({ends})' if ends else ''} on {escape(where)} at "
            f"{escape(row.sampling)}, tau {row.figures['tau'].value:.2f}; {_identical(row)}</li>"
        )
    return f"<ul>{''.join(lines_)}</ul>"


def _identical(row: Row) -> str:
    same = f"{row.num_identical} of {row.num_answers} texts are plain decoding's"
    if row.promise == "text":
        return same
    why = "this rule keeps the law of the text alone" if row.promise == "law" else "LOSSY rule"
    return f"{same} ({why})"


def _legend(group: Group) -> str:
    keys = "".join(
        f'<span class="key c{n % NUM_COLOURS}"></span>{escape(label_of(method))}'
        for n, method in enumerate(group.methods.values())
    )
    shades = ", ".join(_samplings(group))
    return f'<p class="note">{keys}</p><p class="note">From full to faint, or solid to dotted: {escape(shades)}.</p>'


def _samplings(group: Group) -> list[str]:
    return list(dict.fromkeys(row.sampling for row in group.rows))


# --- plots -----------------------------------------------------------------------------------------------------------


def _plots(group: Group) -> str:
    whole = group.wholes
    parts = ["<h3>Speedup by set</h3>", _bars(group, whole, "speedup", "x", 1.0)]
    parts += ["<h3>Tau by set (tokens per target forward)</h3>", _bars(group, whole, "tau", "", 1.0)]
    parts += [_kept(group), "<h3>Acceptance (alpha) by depth</h3>", _alphas(group)]
    categories = [row for row in group.parts if row.category is not None]
    for name in dict.fromkeys(row.set for row in categories):
        own = [row for row in categories if row.set == name]
        parts += [f"<h3>Speedup by category: {escape(name)}</h3>", _bars(group, own, "speedup", "x", 1.0)]
    return "".join(parts)


def _bars(group: Group, rows: Sequence[Row], figure: str, unit: str, reference: float) -> str:
    found: dict[str, list[Bar]] = {}
    for row in rows:
        each = row.figures[figure]
        bar = Bar(f"{label_of(row.method)}, {row.sampling}", each.value, each.low, each.high, *_look(group, row))
        found.setdefault(row.part or row.set, []).append(bar)
    return bars(list(found.items()), unit, reference)


def _look(group: Group, row: Row) -> tuple[int, int]:
    """Colour and shade: the method's and the sampling's place."""
    return list(group.methods).index(row.method["key"]), _samplings(group).index(row.sampling)


def _kept(group: Group) -> str:
    greedy = {(row.set, row.method["key"]): row for row in group.wholes if row.sampling == "T=0"}
    found: dict[str, list[Bar]] = {}
    for row in group.wholes:
        base = greedy.get((row.set, row.method["key"]))
        if base is not None and row.sampling != "T=0":
            share = row.figures["tau"].value / base.figures["tau"].value
            bar = Bar(f"{label_of(row.method)}, {row.sampling}", share, None, None, *_look(group, row))
            found.setdefault(row.set, []).append(bar)
    return f"<h3>Tau as a share of tau at T=0</h3>{bars(list(found.items()), '', 1.0)}" if found else ""


def _alphas(group: Group) -> str:
    """A plot for each set, as deep as drafts came often enough to say anything."""
    found: dict[str, list[Line]] = {}
    for row in group.wholes:
        often = [value for value, times in zip(row.alpha, row.reached, strict=True) if times >= _OFTEN]
        if often:
            line = Line(f"{label_of(row.method)}, {row.sampling}", often, *_look(group, row))
            found.setdefault(row.set, []).append(line)
    return "".join(lines(name, series) for name, series in found.items())


# --- tables ----------------------------------------------------------------------------------------------------------

_LEFT = ("set", "part", "sampling", "draft", "tree", "alpha by depth", "identical")


def _table(rows: Sequence[Row], *, parts: bool = False) -> str:
    names = ["set", *(("part",) if parts else ()), "sampling", "draft", "tree", "questions", "tau", "speedup"]
    names += ["ratio of means", "with prompt", "tokens/s", "plain", "alpha by depth", "identical", "seconds"]
    head = "".join(f'<th class="{_align(name)}">{name}</th>' for name in names)
    body = "".join(_line(row, names) for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _align(name: str) -> str:
    return "l" if name in _LEFT else "r"


def _line(row: Row, names: Iterable[str]) -> str:
    def figure(name: str, unit: str) -> str:
        value, ends = span(row.figures[name], unit)
        return f"{value} <small>{ends}</small>" if ends else value

    rule = "" if row.method["rule"] == "match" else f", {row.method['rule']}"
    cells = {
        "set": escape(row.set),
        "part": escape(row.part),
        "sampling": escape(row.sampling),
        "draft": escape(f"{row.method['draft']}{rule}"),
        "tree": escape(str(row.method["budget"])),
        "questions": str(row.num_questions),
        "tau": figure("tau", ""),
        "speedup": figure("speedup", "x"),
        "ratio of means": figure("speedup_ratio_of_means", "x"),
        "with prompt": figure("speedup_with_prompt", "x"),
        "tokens/s": f"{row.tokens_per_s:.1f}",
        "plain": f"{row.plain_tokens_per_s:.1f}",
        "alpha by depth": " ".join(f"{value:.2f}".removeprefix("0") for value in row.alpha[:10]),
        "identical": f"{row.num_identical} of {row.num_answers}" + ("" if row.lossless else ", LOSSY rule"),
        "seconds": f"{row.seconds:.0f}",
    }
    kinds = {name: _align(name) for name in names}
    kinds["identical"] += "" if row.keeps_promise and row.lossless else " bad"
    line = "".join(f'<td class="{kinds[name]}">{cells[name]}</td>' for name in names)
    kind = ' class="mean"' if row.set == MEAN else ""
    return f"<tr{kind}>{line}</tr>"


# --- what went otherwise, and what it depends on ---------------------------------------------------------------------


def _differences(group: Group) -> str:
    if not group.differences:
        return ""
    found = [
        f"<details><summary>{escape(each['set'])}, question {escape(str(each['id']))}, turn {each['turn']}, "
        f"{escape(each['sampling'])}: {escape(label_of(each))}, from token {each['differs_at'] + 1} on</summary>"
        f"<p>plain decoding:</p><pre>{escape(each['plain_text'])}</pre>"
        f"<p>drafted:</p><pre>{escape(each['text'])}</pre></details>"
        for each in group.differences
    ]
    return f"<h3>Texts that differ from plain decoding's ({len(found)})</h3>{''.join(found)}"


def _skipped(group: Group) -> str:
    if not group.skipped:
        return ""
    found = "".join(
        f"<li>{escape(each['set'])}, question {escape(str(each['id']))}, turn {each['turn']}, "
        f"{escape(each['sampling'])}: {each['prompt_tokens']:,} tokens</li>"
        for each in group.skipped
    )
    room = f"{group.skipped[0]['context']:,}"
    return f"<h3>Skipped: no room for prompt and answer in a context of {room} tokens</h3><ul>{found}</ul>"


def _settings(group: Group) -> str:
    settings = {**group.settings, "folders": ", ".join(group.folders)}
    machine = settings.pop("machine")
    sets = {each["name"]: f"{each['file']}, {each['num_questions']} questions" for each in group.sets.values()}
    return (
        f"<h3>Machine</h3>{_pairs(machine)}<h3>Settings</h3>{_pairs(settings)}<h3>Sets</h3>{_pairs(sets)}"
        '<p class="note">Plain decoding, by the same decoder with the same settings, took turns with every draft on '
        "every prompt. Speedup: mean over questions of the ratio of tokens per second, decoding alone; ratio of means: "
        "the means of both rates; with prompt: the same with the prompt's prefill in both times, as EAGLE's and "
        "Spec-Bench's scripts have it. In brackets or small: 95% bootstrap intervals over questions.</p>"
    )


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td class="l">{escape(str(name).replace("_", " "))}</td><td class="l">{escape(str(value))}</td></tr>'
        for name, value in values.items()
        if value is not None
    )
    return f'<div class="wide"><table>{rows}</table></div>'
