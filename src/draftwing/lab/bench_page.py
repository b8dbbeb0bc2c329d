"""Render results of ``draftwing bench`` as one HTML page without external resources: plots as SVG, tables, settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from draftwing.lab.bench_results import MEAN, Estimate, Group, ResultRow

MIN_REACHED = 10  # drafts that must reach a depth for it to be plotted
NUM_COLOURS = 8
_ROW, _GAP, _TOP = 17, 12, 22  # pixels
_PLOT, _VALUES = 440, 130
_LETTER = 6.8  # average width of a character
# Colours that colour-blind readers can distinguish (after Okabe and Ito), on white and on black.
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


# --- plots -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """One bar; ``low`` and ``high`` are None without an interval. ``kind`` is the CSS class of its colour and shade."""

    label: str
    value: float
    low: float | None
    high: float | None
    kind: str


@dataclass(frozen=True)
class Line:
    """One line through the points (1, values[0]), (2, values[1]), ..."""

    label: str
    values: Sequence[float]
    kind: str


def bars(groups: Mapping[str, Sequence[Bar]], unit: str = "") -> str:
    """Draw groups of horizontal bars with whiskers for the intervals, and a reference line at 1."""
    every = [bar for group in groups.values() for bar in group]
    largest = max([1.0, *(max(bar.value, bar.high or 0.0) for bar in every)])
    step = next(step for step in (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 1e3, 1e9) if largest / step <= 6)
    num_steps = math.ceil(largest / step - 1e-9)
    scale = _PLOT / (step * num_steps)
    left = min(max(180.0, 12 + _LETTER * max((len(bar.label) for bar in every), default=0)), 460.0)
    height = _TOP + sum(_ROW * (len(group) + 1) + _GAP for group in groups.values())
    parts = []
    for number in range(num_steps + 1):
        x = number * step * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{height - _GAP}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_TOP - 9}">{number * step:g}{escape(unit)}</text>')
    parts.append(f'<line class="reference" x1="{scale:.1f}" x2="{scale:.1f}" y1="{_TOP - 4}" y2="{height - _GAP}"/>')
    y = float(_TOP)
    for name, group in groups.items():
        parts.append(f'<text class="head" x="{-left:.0f}" y="{y + 12:.0f}">{escape(name)}</text>')
        for bar in group:
            y += _ROW
            parts.append(_bar(bar, y, scale, unit))
        y += _ROW + _GAP
    return _svg(left + _PLOT + _VALUES, height, parts, -left)


def _bar(bar: Bar, y: float, scale: float, unit: str) -> str:
    middle, value, right = y + _ROW / 2, f"{bar.value:.2f}{unit}", bar.value * scale
    whisker = ""
    if bar.low is not None and bar.high is not None:
        value += f" [{bar.low:.2f}, {bar.high:.2f}]"
        right = max(bar.high * scale, right)
        ends = f'x1="{bar.low * scale:.1f}" x2="{bar.high * scale:.1f}"'
        whisker = f'<line class="whisker" {ends} y1="{middle:.1f}" y2="{middle:.1f}"/>'
    return (
        f'<text class="label" x="-6" y="{middle + 4:.1f}">{escape(bar.label)}</text>'
        f'<rect class="{bar.kind}" x="0" y="{y + 3:.1f}" width="{bar.value * scale:.1f}" height="{_ROW - 6}">'
        f"<title>{escape(f'{bar.label}: {value}')}</title></rect>{whisker}"
        f'<text x="{right + 6:.1f}" y="{middle + 4:.1f}">{escape(value)}</text>'
    )


def lines(title: str, series: Sequence[Line]) -> str:
    """Draw shares from 0 to 1 by depth as a small plot without a legend."""
    width, height, left, top = 330, 190, 34, 24
    bottom, depth = height - 26, max(len(line.values) for line in series)
    across = (width - left - 12) / max(depth - 1, 1)
    parts = [f'<text class="head" x="0" y="12">{escape(title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * (bottom - top)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="label" x="{left - 5}" y="{y + 4:.1f}">{share:g}</text>')
    for number in range(0, depth, 1 + depth // 12):
        parts.append(f'<text class="tick" x="{left + number * across:.1f}" y="{bottom + 15}">{number + 1}</text>')
    for line in series:
        points = [(left + n * across, bottom - value * (bottom - top), value) for n, value in enumerate(line.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline class="{line.kind}" points="{path}"><title>{escape(line.label)}</title></polyline>')
        for x, y, value in points:
            hint = f"<title>{escape(f'{line.label}: {value:.2f}')}</title>"
            parts.append(f'<circle class="{line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.6">{hint}</circle>')
    return _svg(width, height, parts)


def _svg(width: float, height: float, parts: Sequence[str], left: float = 0) -> str:
    return (
        f'<svg viewBox="{left:.0f} 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


# --- the page --------------------------------------------------------------------------------------------------------


def render(groups: Sequence[Group], title: str = "draftwing bench") -> str:
    """Return the page as HTML, one part for each group."""
    note = (
        '<p class="note">Results of other settings or machines are in separate parts, which do not compare.</p>'
        if len(groups) > 1
        else ""
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>{note}{''.join(map(_group, groups))}</body></html>\n"
    )


def _style() -> str:
    light, dark = (" ".join(f"--c{n}: {colour};" for n, colour in enumerate(colours)) for colours in (_LIGHT, _DARK))
    kinds = "".join(
        f"svg .c{n} {{ fill: var(--c{n}); stroke: none; }} svg polyline.c{n} {{ fill: none; stroke: var(--c{n}); }} "
        f"span.c{n} {{ background: var(--c{n}); }}\n"
        for n in range(NUM_COLOURS)
    )
    return _STYLE.replace("LIGHT", light).replace("DARK", dark) + kinds


def _group(group: Group) -> str:
    s, machine = group.settings, group.settings["machine"]
    model = f"{s['target']}, {s['dtype']}" + ("" if s["quantize"] == "none" else f", {s['quantize']}")
    is_gpu = str(s["device"]).startswith("cuda")
    place = machine["gpu"] if is_gpu else f"{machine['cpu']}, {machine['threads']} threads"
    keys = "".join(
        f'<span class="key c{n % NUM_COLOURS}"></span>{escape(_name(method))}'
        for n, method in enumerate(group.methods.values())
    )
    parts = [f"<h2>{escape(f'{model}, {place}')}</h2>", _summary(group), f'<p class="note">{keys}</p>']
    parts.append(f'<p class="note">From full to faint, or solid to dotted: {escape(", ".join(_samplings(group)))}.</p>')
    parts += [_plots(group), "<h3>By set</h3>", _table(group.wholes)]
    if group.parts:
        parts += ["<h3>By turn and category</h3>", _table(group.parts, parts=True)]
    parts += [_differences(group), _skipped(group), _settings(group)]
    return "".join(parts)


def _name(method: Mapping[str, Any]) -> str:
    return f"{method['draft']}, {method['budget']}{_rule(method)}"


def _rule(method: Mapping[str, Any]) -> str:
    return "" if method["rule"] == "match" else f", {method['rule']}"


def _samplings(group: Group) -> list[str]:
    return list(dict.fromkeys(row.sampling for row in group.rows))


def _span(estimate: Estimate, unit: str) -> tuple[str, str]:
    """Return a figure, and its interval as ``1.52-1.71`` or an empty string."""
    interval = "" if estimate.low is None or estimate.high is None else f"{estimate.low:.2f}-{estimate.high:.2f}"
    return f"{estimate.value:.2f}{unit}", interval


def _summary(group: Group) -> str:
    """One sentence for each method: on the mean of all sets, if there are several."""
    items = []
    for row in [row for row in group.wholes if row.set == MEAN] or group.wholes:
        value, interval = _span(row.figures["speedup"], "x")
        identical = f"{row.num_identical} of {row.num_answers} answers are the baseline's"
        if row.promise != "text":
            identical += f" ({'this rule preserves only the distribution' if row.promise == 'law' else 'LOSSY rule'})"
        items.append(
            f"<li>{escape(_name(row.method))}: <b>{value}</b>{f' ({interval})' if interval else ''} on "
            f"{'the mean of all sets' if row.set == MEAN else escape(row.set)} at {escape(row.sampling)}, tau "
            f"{row.figures['tau'].value:.2f}; {identical}</li>"
        )
    return f"<ul>{''.join(items)}</ul>"


def _plots(group: Group) -> str:
    looks = {
        (key, sampling): f"c{n % NUM_COLOURS} s{min(shade, 2)}"
        for n, key in enumerate(group.methods)
        for shade, sampling in enumerate(_samplings(group))
    }

    def label_and_look(row: ResultRow) -> tuple[str, str]:
        return f"{_name(row.method)}, {row.sampling}", looks[row.method["key"], row.sampling]

    def plot(rows: Sequence[ResultRow], figure: str, unit: str) -> str:
        drawn: dict[str, list[Bar]] = {}
        for row in rows:
            label, look = label_and_look(row)
            value = row.figures[figure]
            drawn.setdefault(row.part or row.set, []).append(Bar(label, value.value, value.low, value.high, look))
        return bars(drawn, unit)

    greedy = {(row.set, row.method["key"]): row.figures["tau"].value for row in group.wholes if row.sampling == "T=0"}
    kept: dict[str, list[Bar]] = {}
    alphas: dict[str, list[Line]] = {}
    for row in group.wholes:
        label, look = label_and_look(row)
        base = greedy.get((row.set, row.method["key"]))
        if base is not None and row.sampling != "T=0":
            kept.setdefault(row.set, []).append(Bar(label, row.figures["tau"].value / base, None, None, look))
        alpha = [value for value, times in zip(row.alpha, row.reached, strict=True) if times >= MIN_REACHED]
        if alpha:
            alphas.setdefault(row.set, []).append(Line(label, alpha, look))
    parts = ["<h3>Speedup by set</h3>", plot(group.wholes, "speedup", "x")]
    parts += ["<h3>Tau by set (tokens per target forward)</h3>", plot(group.wholes, "tau", "")]
    if kept:
        parts += ["<h3>Tau as a share of tau at T=0</h3>", bars(kept)]
    parts.append("<h3>Acceptance (alpha) by depth</h3>")
    parts += [lines(name, series) for name, series in alphas.items()]
    categories = [row for row in group.parts if row.category is not None]
    for name in dict.fromkeys(row.set for row in categories):
        parts.append(f"<h3>Speedup by category: {escape(name)}</h3>")
        parts.append(plot([row for row in categories if row.set == name], "speedup", "x"))
    return "".join(parts)


# --- tables ----------------------------------------------------------------------------------------------------------

_LEFT = ("set", "part", "sampling", "draft", "tree", "alpha by depth", "identical")


def _table(rows: Sequence[ResultRow], *, parts: bool = False) -> str:
    columns = [name for name in _cells(rows[0]) if parts or name != "part"] if rows else []
    head = "".join(f'<th class="{_align(name)}">{name}</th>' for name in columns)
    body = ""
    for row in rows:
        cells = _cells(row)
        bad = "" if row.keeps_promise and row.lossless else " bad"
        line = "".join(
            f'<td class="{_align(name)}{bad if name == "identical" else ""}">{cells[name]}</td>' for name in columns
        )
        mean = ' class="mean"' if row.set == MEAN else ""
        body += f"<tr{mean}>{line}</tr>"
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _align(name: str) -> str:
    return "l" if name in _LEFT else "r"


def _cells(row: ResultRow) -> dict[str, str]:
    """Return the HTML of every column, in order."""

    def figure(name: str, unit: str) -> str:
        value, interval = _span(row.figures[name], unit)
        return f"{value} <small>{interval}</small>" if interval else value

    return {
        "set": escape(row.set),
        "part": escape(row.part),
        "sampling": escape(row.sampling),
        "draft": escape(row.method["draft"] + _rule(row.method)),
        "tree": escape(str(row.method["budget"])),
        "questions": str(row.num_questions),
        "tau": figure("tau", ""),
        "speedup": figure("speedup", "x"),
        "ratio of means": figure("speedup_ratio_of_means", "x"),
        "with prompt": figure("speedup_with_prompt", "x"),
        "tokens/s": f"{row.tokens_per_s:.1f}",
        "baseline": f"{row.plain_tokens_per_s:.1f}",
        "alpha by depth": " ".join(f"{value:.2f}".removeprefix("0") for value in row.alpha[:10]),
        "identical": f"{row.num_identical} of {row.num_answers}" + ("" if row.lossless else ", LOSSY rule"),
        "seconds": f"{row.seconds:.0f}",
    }


# --- differences and settings ----------------------------------------------------------------------------------------


def _where(record: Mapping[str, Any]) -> str:
    return escape(f"{record['set']}, question {record['id']}, turn {record['turn']}, {record['sampling']}")


def _differences(group: Group) -> str:
    items = [
        f"<details><summary>{_where(answer)}: {escape(_name(answer))}, from token {answer['differs_at'] + 1} on"
        f"</summary><p>baseline:</p><pre>{escape(answer['plain_text'])}</pre>"
        f"<p>drafted:</p><pre>{escape(answer['text'])}</pre></details>"
        for answer in group.differences
    ]
    return f"<h3>Answers that differ from the baseline's ({len(items)})</h3>{''.join(items)}" if items else ""


def _skipped(group: Group) -> str:
    if not group.skipped:
        return ""
    items = "".join(f"<li>{_where(turn)}: {turn['prompt_tokens']:,} tokens</li>" for turn in group.skipped)
    context = f"{group.skipped[0]['context']:,}"
    return f"<h3>Skipped: prompt and answer exceed the context of {context} tokens</h3><ul>{items}</ul>"


def _settings(group: Group) -> str:
    settings = {**group.settings, "folders": ", ".join(group.folders)}
    machine = settings.pop("machine")
    sets = {record["name"]: f"{record['file']}, {record['num_questions']} questions" for record in group.sets.values()}
    return (
        f"<h3>Machine</h3>{_pairs(machine)}<h3>Settings</h3>{_pairs(settings)}<h3>Sets</h3>{_pairs(sets)}"
        '<p class="note">The baseline is the same decoder with the same settings and no drafts; it took turns with '
        "every draft on every prompt. Speedup: mean over questions of the ratio of tokens per second, decoding only; "
        "ratio of means: mean tokens per second over the baseline's; with prompt: the same with the prefill in both "
        "times, like the scripts of EAGLE and Spec-Bench. Small or in brackets: 95% bootstrap intervals over "
        "questions.</p>"
    )


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td class="l">{escape(str(name).replace("_", " "))}</td><td class="l">{escape(str(value))}</td></tr>'
        for name, value in values.items()
        if value is not None
    )
    return f'<div class="wide"><table>{rows}</table></div>'
