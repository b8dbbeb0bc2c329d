"""Plots as SVG that takes its colours from the page around it: bars with intervals, and lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "Line", "bars", "lines"]

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
    """The next whole number, at least 1."""
    return max(1, -int(-ratio // 1) if abs(ratio - round(ratio)) > 1e-9 else round(ratio))


def _step(most: float) -> float:
    """A round distance between grid lines, of which about five go up to ``most``."""
    return next(step for step in (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 1e3, 1e9) if most / step <= 6)
