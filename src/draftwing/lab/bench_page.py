"""Render results of ``draftwing bench`` as one HTML page without external resources: plots as SVG, tables, settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup

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
th.l, td.l { text-align: left; } td.bad { color: var(--c7); font-weight: 600; }
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

_PAGE = """
{%- macro pairs(values) -%}
<div class="wide"><table>
{%- for name, value in values.items() if value is not none -%}
<tr><td class="l">{{ name|replace("_", " ") }}</td><td class="l">{{ value }}</td></tr>
{%- endfor -%}
</table></div>
{%- endmacro -%}
{%- macro table(rows, hidden) -%}
<div class="wide"><table><tr>
{%- for name in rows[0].cells() if name not in hidden -%}<th class="{{ align(name) }}">{{ name }}</th>{%- endfor -%}
</tr>
{%- for row in rows -%}
<tr{% if row.set == MEAN %} class="mean"{% endif %}>
{%- for name, cell in row.cells().items() if name not in hidden -%}
{%- set is_bad = name == "identical" and not (row.keeps_promise and row.lossless) -%}
<td class="{{ align(name) }}{% if is_bad %} bad{% endif %}">{{ cell }}</td>
{%- endfor -%}
</tr>
{%- endfor -%}
</table></div>
{%- endmacro -%}
{%- macro place(record) -%}
{{ record.set }}, question {{ record.id }}, turn {{ record.turn }}, {{ record.sampling }}
{%- endmacro -%}
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>{{ style }}</style></head>
<body><h1>{{ title }}</h1>
{% if groups|length > 1 -%}
<p class="note">Results of other settings or machines are in separate parts, which do not compare.</p>
{%- endif %}
{% for group in groups %}
{%- set s, machine = group.settings, group.settings.machine -%}
<h2>{{ s.target }}, {{ s.dtype }}{% if s.quantize != "none" %}, {{ s.quantize }}{% endif %},
{{ machine.gpu if s.device.startswith("cuda") else machine.cpu ~ ", " ~ machine.threads ~ " threads" }}</h2>
<ul>
{% for row in summary(group) -%}
<li>{{ name(row.method) }}: <b>{{ row.figures.speedup.text("x") }}</b> on
{{ "the mean of all sets" if row.set == MEAN else row.set }} at {{ row.sampling }}, tau {{ row.cells().tau }};
{{ row.num_identical }} of {{ row.num_answers }} answers are the baseline's
{%- if row.promise == "distribution" %} (this rule preserves only the distribution)
{%- elif row.promise != "text" %} (LOSSY rule){% endif %}</li>
{% endfor -%}
</ul>
<p class="note">
{%- for method in group.methods.values() -%}
<span class="key c{{ loop.index0 % num_colours }}"></span>{{ name(method) }}
{%- endfor -%}
</p>
<p class="note">From full to faint, or solid to dotted: {{ samplings(group)|join(", ") }}.</p>
{% for title, plot in plots(group) %}{% if title %}<h3>{{ title }}</h3>{% endif %}{{ plot }}
{% endfor -%}
{% if group.wholes %}<h3>By set</h3>{{ table(group.wholes, ["part"]) }}{% endif %}
{% if group.parts %}<h3>By turn and category</h3>{{ table(group.parts, []) }}{% endif %}
{% if group.differences -%}
<h3>Answers that differ from the baseline's ({{ group.differences|length }})</h3>
{% for answer in group.differences -%}
<details><summary>{{ place(answer) }}: {{ name(answer) }}, from token {{ answer.differs_at + 1 }} on</summary>
<p>baseline:</p><pre>{{ answer.plain_text }}</pre><p>drafted:</p><pre>{{ answer.text }}</pre></details>
{% endfor %}{% endif %}
{% if group.skipped -%}
<h3>Skipped: prompt and answer exceed the context of {{ "{:,}".format(group.skipped[0].context) }} tokens</h3>
<ul>
{%- for turn in group.skipped %}<li>{{ place(turn) }}: {{ "{:,}".format(turn.prompt_tokens) }} tokens</li>{% endfor -%}
</ul>
{%- endif %}
<h3>Machine</h3>{{ pairs(machine) }}
<h3>Settings</h3>{{ pairs(settings(group)) }}
<h3>Sets</h3><div class="wide"><table>
{%- for record in group.sets.values() -%}
<tr><td class="l">{{ record.name }}</td><td class="l">{{ record.file }}, {{ record.num_questions }} questions</td></tr>
{%- endfor -%}
</table></div>
<p class="note">The baseline ("plain") is the same decoder with the same settings and no drafts; it took turns with
every draft on every prompt. Speedup: mean over questions of the ratio of tokens per second, decoding only; of means:
mean tokens per second over the baseline's; with prompt: the same with the prefill in both times, like the scripts of
EAGLE and Spec-Bench. In brackets: 95% bootstrap intervals over questions.</p>
{% endfor %}</body></html>
"""


# --- plots -----------------------------------------------------------------------------------------------------------


# A label, figures (of a line: by depth), and the CSS classes of colour and shade.
Bar = tuple[str, Estimate, str]
Line = tuple[str, Sequence[float], str]


def bars(groups: Mapping[str, Sequence[Bar]], unit: str = "") -> Markup:
    """Draw groups of horizontal bars with whiskers for the intervals, and a reference line at 1."""
    every = [bar for group in groups.values() for bar in group]
    largest = max([1.0, *(max(figure.value, figure.high or 0.0) for _, figure, _ in every)])
    step = next(step for step in (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 1e3, 1e9) if largest / step <= 6)
    num_steps = math.ceil(largest / step - 1e-9)
    scale = _PLOT / (step * num_steps)
    left = min(max(180.0, 12 + _LETTER * max((len(label) for label, _, _ in every), default=0)), 460.0)
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
        for label, figure, kind in group:
            y += _ROW
            middle, text, right = y + _ROW / 2, figure.text(unit), figure.value * scale
            parts.append(
                f'<text class="label" x="-6" y="{middle + 4:.1f}">{escape(label)}</text>'
                f'<rect class="{kind}" x="0" y="{y + 3:.1f}" width="{right:.1f}" height="{_ROW - 6}">'
                f"<title>{escape(f'{label}: {text}')}</title></rect>"
            )
            if figure.low is not None and figure.high is not None:
                right = max(figure.high * scale, right)
                ends = f'x1="{figure.low * scale:.1f}" x2="{figure.high * scale:.1f}"'
                parts.append(f'<line class="whisker" {ends} y1="{middle:.1f}" y2="{middle:.1f}"/>')
            parts.append(f'<text x="{right + 6:.1f}" y="{middle + 4:.1f}">{escape(text)}</text>')
        y += _ROW + _GAP
    return _svg(left + _PLOT + _VALUES, height, parts, -left)


def lines(title: str, series: Sequence[Line]) -> Markup:
    """Draw shares from 0 to 1 by depth as a small plot without a legend."""
    width, height, left, top = 330, 190, 34, 24
    bottom, depth = height - 26, max(len(values) for _, values, _ in series)
    across = (width - left - 12) / max(depth - 1, 1)
    parts = [f'<text class="head" x="0" y="12">{escape(title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * (bottom - top)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="label" x="{left - 5}" y="{y + 4:.1f}">{share:g}</text>')
    for number in range(0, depth, 1 + depth // 12):
        parts.append(f'<text class="tick" x="{left + number * across:.1f}" y="{bottom + 15}">{number + 1}</text>')
    for label, values, kind in series:
        points = [(left + n * across, bottom - value * (bottom - top), value) for n, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        parts.append(f'<polyline class="{kind}" points="{path}"><title>{escape(label)}</title></polyline>')
        for x, y, value in points:
            hint = f"<title>{escape(f'{label}: {value:.2f}')}</title>"
            parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.6">{hint}</circle>')
    return _svg(width, height, parts)


def _svg(width: float, height: float, parts: Sequence[str], left: float = 0) -> Markup:
    return Markup(
        f'<svg viewBox="{left:.0f} 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _plots(group: Group) -> list[tuple[str, Markup]]:
    """Return the title (empty under the title of the plot before) and the SVG of each plot."""
    kinds = {
        (key, sampling): f"c{n % NUM_COLOURS} s{min(shade, 2)}"
        for n, key in enumerate(group.methods)
        for shade, sampling in enumerate(_samplings(group))
    }

    def label_and_kind(row: ResultRow) -> tuple[str, str]:
        return f"{_name(row.method)}, {row.sampling}", kinds[row.method["key"], row.sampling]

    def plot(rows: Sequence[ResultRow], figure: str, unit: str) -> Markup:
        drawn: dict[str, list[Bar]] = {}
        for row in rows:
            label, kind = label_and_kind(row)
            drawn.setdefault(row.part or row.set, []).append((label, row.figures[figure], kind))
        return bars(drawn, unit)

    greedy = {(row.set, row.method["key"]): row.figures["tau"].value for row in group.wholes if row.sampling == "T=0"}
    shares: dict[str, list[Bar]] = {}
    alphas: dict[str, list[Line]] = {}
    for row in group.wholes:
        label, kind = label_and_kind(row)
        base = greedy.get((row.set, row.method["key"]))
        if base is not None and row.sampling != "T=0":
            share = Estimate.of(row.figures["tau"].value / base, np.empty(0))
            shares.setdefault(row.set, []).append((label, share, kind))
        alpha = [value for value, times in zip(row.alpha, row.reached, strict=True) if times >= MIN_REACHED]
        if alpha:
            alphas.setdefault(row.set, []).append((label, alpha, kind))
    plots = [
        ("Speedup by set", plot(group.wholes, "speedup", "x")),
        ("Tau by set (tokens per target forward)", plot(group.wholes, "tau", "")),
    ]
    if shares:
        plots.append(("Tau as a share of tau at T=0", bars(shares)))
    plots.append(("Acceptance (alpha) by depth", Markup("")))
    plots += [("", lines(name, series)) for name, series in alphas.items()]
    categories = [row for row in group.parts if row.category is not None]
    for name in dict.fromkeys(row.set for row in categories):
        rows = [row for row in categories if row.set == name]
        plots.append((f"Speedup by category: {name}", plot(rows, "speedup", "x")))
    return plots


# --- the page --------------------------------------------------------------------------------------------------------


def render(groups: Sequence[Group], title: str = "draftwing bench") -> str:
    """Return the page as HTML, one part for each group."""
    light, dark = (" ".join(f"--c{n}: {colour};" for n, colour in enumerate(colours)) for colours in (_LIGHT, _DARK))
    kinds = "".join(
        f"svg .c{n} {{ fill: var(--c{n}); stroke: none; }} svg polyline.c{n} {{ fill: none; stroke: var(--c{n}); }} "
        f"span.c{n} {{ background: var(--c{n}); }}\n"
        for n in range(NUM_COLOURS)
    )
    names = ("set", "part", "sampling", "draft", "tree", "alpha by depth", "identical")
    return Environment(autoescape=True).from_string(_PAGE).render(
        title=title,
        groups=groups,
        style=Markup(_STYLE.replace("LIGHT", light).replace("DARK", dark) + kinds),
        num_colours=NUM_COLOURS,
        MEAN=MEAN,
        name=_name,
        samplings=_samplings,
        plots=_plots,
        align=lambda column: "l" if column in names else "r",
        summary=lambda group: [row for row in group.wholes if row.set == MEAN] or group.wholes,
        settings=lambda group: {**group.settings, "machine": None, "folders": ", ".join(group.folders)},
    )  # fmt: skip


def _name(method: Mapping[str, Any]) -> str:
    rule = "" if method["rule"] == "match" else f", {method['rule']}"
    return f"{method['draft']}, {method['budget']}{rule}"


def _samplings(group: Group) -> list[str]:
    return list(dict.fromkeys(row.sampling for row in group.rows))
