"""Figures as inline SVG: numbers in, markup out, colours from the page's style sheet so that they follow light and dark.

Every label is escaped here; nothing is known about what the numbers mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 520, 180  # of a plot, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34


def histogram(values: Sequence[int], *, label: str, bins: int = 24) -> Markup:
    """Counts of whole numbers in `bins` equal classes from 0 to a round number above the largest."""
    top = nice(max(values, default=0) or 1)
    width = top / bins
    counts = [0] * bins
    for value in values:
        counts[min(int(value / width), bins - 1)] += 1
    return bars([(f"{i * width:.0f}–{(i + 1) * width:.0f}", count) for i, count in enumerate(counts)], 0, top, label)


def bars(named: Sequence[tuple[str, float]], low: float, high: float, label: str) -> Markup:
    """Adjoining bars over an x axis from `low` to `high`."""
    top = nice(max((count for _, count in named), default=0) or 1)
    step = (WIDTH - LEFT - RIGHT) / max(len(named), 1)
    drawn = [
        f'<rect class="bar" x="{LEFT + i * step + 0.5:.1f}" y="{_y(count, 0, top):.1f}" width="{max(step - 1, 0.5):.1f}" '
        f'height="{_y(0, 0, top) - _y(count, 0, top):.1f}"><title>{escape(name)}: {count:g}</title></rect>'
        for i, (name, count) in enumerate(named)
    ]
    return _plot(drawn, (low, high), (0, top), label)


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]  # (x, y), x ascending


def lines(drawn: Sequence[Line], *, label: str, low: float | None = None) -> Markup:
    """Curves over a shared axis, at most three (the style sheet has three colours); `low` fixes the y axis's lower end."""
    xs = [x for line in drawn for x, _ in line.points] or [0]
    ys = [y for line in drawn for _, y in line.points] or [0]
    bottom = min(ys) if low is None else low
    across, up = (min(xs), max(xs)), (bottom, bottom + nice((max(ys) - bottom) or 1))
    paths = []
    for number, line in enumerate(drawn):
        path = " ".join(f"{_x(x, *across):.1f},{_y(y, *up):.1f}" for x, y in line.points)
        paths.append(
            f'<polyline class="line line-{number}" points="{path}"><title>{escape(line.name)}</title></polyline>'
        )
    return _plot(paths, across, up, label)


def _plot(drawn: Sequence[str], across: tuple[float, float], up: tuple[float, float], label: str) -> Markup:
    ticks = []
    for i in range(5):
        y_value, x_value = up[0] + (up[1] - up[0]) * i / 4, across[0] + (across[1] - across[0]) * i / 4
        if across[1] - across[0] >= 4:
            x_value = round(x_value)
        y, x = _y(y_value, *up), _x(x_value, *across)
        ticks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        ticks.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{short(y_value)}</text>')
        anchor = ("start", "middle", "middle", "middle", "end")[i]
        ticks.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="{anchor}">{short(x_value)}</text>'
        )
    caption = f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(label)}</text>'
    body = "".join([*ticks, *drawn, caption])
    return Markup(
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{body}</svg>'
    )


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / ((high - low) or 1)


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / ((high - low) or 1)


def nice(value: float) -> float:
    """The smallest of 1, 2, 2.5, 4, 5, 8, 10 times a power of ten that is not below `value` (> 0)."""
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 4, 5, 8, 10) if step * power >= value * (1 - 1e-9))


def short(value: float) -> str:
    """A number for an axis: 1.2M, 35k, 0.25."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class Bar:
    name: str
    group: str
    start: float  # seconds
    end: float
    note: str


def timeline(jobs: Sequence[Bar]) -> Markup:
    """One line for each group with its jobs as bars over time; time without any job is cut out at more than a minute."""
    jobs = sorted(jobs, key=lambda job: job.start)
    groups = list(dict.fromkeys(job.group for job in jobs))
    folded, gaps = _without_idle(jobs)
    top, row, left = 8, 26, 110
    end = max((stop for _, stop in folded), default=0) or 1
    width = 1080

    def x(seconds: float) -> float:
        return left + (width - left - 10) * seconds / end

    drawn = []
    for number, group in enumerate(groups):
        y = top + number * row
        drawn.append(f'<text class="label" x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(group)}</text>')
        drawn.append(f'<line class="grid" x1="{left}" x2="{width - 10}" y1="{y + row - 3}" y2="{y + row - 3}"/>')
    for job, (start, stop) in zip(jobs, folded, strict=True):
        y = top + groups.index(job.group) * row
        drawn.append(
            f'<rect class="bar" x="{x(start):.1f}" y="{y + 3}" width="{max(x(stop) - x(start), 1.5):.1f}" height="16" rx="2">'
            f"<title>{escape(job.name)}: {duration(job.end - job.start)}{escape(job.note)}</title></rect>"
        )
    bottom = top + len(groups) * row
    for gap in gaps:
        drawn.append(f'<line class="gap" x1="{x(gap):.1f}" x2="{x(gap):.1f}" y1="{top}" y2="{bottom}"/>')
    for i in range(5):
        anchor = ("start", "middle", "middle", "middle", "end")[i]
        at = x(end * i / 4)
        drawn.append(
            f'<text class="tick" x="{at:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{duration(end * i / 4)}</text>'
        )
    return Markup(
        f'<svg class="timeline" viewBox="0 0 {width} {bottom + 24}" role="img" aria-label="jobs over time">{"".join(drawn)}</svg>'
    )


def _without_idle(jobs: Sequence[Bar], longest: float = 60.0) -> tuple[list[tuple[float, float]], list[float]]:
    """(start, end) of each job (in order of their starts) with long idle times cut out, and where they were cut."""
    folded, gaps, cut = [], [], jobs[0].start if jobs else 0.0
    busy = cut
    for job in jobs:
        if job.start - busy > longest:
            cut += job.start - busy
            gaps.append(job.start - cut)
        folded.append((job.start - cut, job.end - cut))
        busy = max(busy, job.end)
    return folded, gaps


def duration(seconds: float) -> str:
    """Seconds for people: 0.4 s, 38 s, 2 min 5 s, 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"


@dataclass(frozen=True)
class Node:
    column: int
    title: str
    note: str


def graph(columns: Sequence[str], nodes: Mapping[str, Node], edges: Sequence[tuple[str, str]]) -> Markup:
    """Boxes in named columns with curves between them; `edges` are pairs of keys of `nodes`."""
    width, height, across, down, head = 132, 44, 28, 12, 24
    tallest = max((sum(n.column == c for n in nodes.values()) for c in range(len(columns))), default=1)
    total = (len(columns) * (width + across) - across, head + tallest * (height + down))
    places, filled = {}, dict.fromkeys(range(len(columns)), 0)
    for key, node in nodes.items():
        count = sum(n.column == node.column for n in nodes.values())
        y = head + (total[1] - head - count * (height + down)) / 2 + filled[node.column] * (height + down)
        places[key] = (node.column * (width + across), y)
        filled[node.column] += 1
    drawn = [
        f'<text class="column" x="{c * (width + across) + width / 2}" y="12" text-anchor="middle">{escape(name)}</text>'
        for c, name in enumerate(columns)
    ]
    for start, end in edges:
        (x1, y1), (x2, y2) = places[start], places[end]
        x1, y1, y2 = x1 + width, y1 + height / 2, y2 + height / 2
        bend = max((x2 - x1) / 2, across / 2)
        faint = " far" if x2 - x1 > across else ""
        drawn.append(
            f'<path class="edge{faint}" d="M{x1} {y1:.1f}C{x1 + bend} {y1:.1f} {x2 - bend} {y2:.1f} {x2} {y2:.1f}"/>'
        )
    for key, (x, y) in places.items():
        node = nodes[key]
        drawn.append(
            f'<g><rect class="node" x="{x}" y="{y:.1f}" width="{width}" height="{height}" rx="7"/>'
            f'<text class="title" x="{x + 10}" y="{y + 18:.1f}">{escape(_fitting(node.title, 18))}</text>'
            f'<text class="note" x="{x + 10}" y="{y + 34:.1f}">{escape(_fitting(node.note, 22))}</text>'
            f"<title>{escape(node.title)}: {escape(node.note)}</title></g>"
        )
    return Markup(
        f'<svg class="graph" viewBox="-2 -2 {total[0] + 4} {total[1] + 4:.0f}" role="img" aria-label="the workflow\'s graph">'
        f"{''.join(drawn)}</svg>"
    )


def _fitting(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
