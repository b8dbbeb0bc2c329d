"""One page of HTML that needs nothing else: figures, plots, texts that differ, machine and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from draftwing.evaluate.bench.chart import NUM_COLOURS, Bar, Line, bars, lines
from draftwing.evaluate.bench.results import MEAN, Group, Row
from draftwing.evaluate.bench.statistics import Estimate

__all__ = ["label_of", "render", "span"]

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
    """How much of greedy decoding's tau is left where tokens are sampled."""
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
