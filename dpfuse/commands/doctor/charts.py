"""Charts as SVG text, without any library, so that a page needs no network. Knows numbers and labels only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["bars", "lines"]

WIDTH, HEIGHT, LEFT, BOTTOM = 420, 200, 56, 28  # in units of the drawing; small, so that text is legible on a phone
ROW = 34  # of a bar


def lines(series: Mapping[str, Sequence[float | None]], *, label: str) -> str:
    """Return a chart with one line per series, over the step.

    Args:
        series: values by name; None where a step has none. A line ends before a number that is not finite, and the
            first of these is marked.
        label: of the vertical axis.

    Example:
        >>> from dpfuse.commands.doctor.charts import lines
        >>> lines({"a": [1.0, 2.0]}, label="loss").count("<polyline")
        1
    """
    shown = {name: _parts_of(values) for name, values in series.items()}
    heights = [value for parts in shown.values() for points in parts for _, value in points]
    marks = dict.fromkeys(mark for values in series.values() if (mark := _mark_of(values)) is not None)
    if not heights and not marks:
        return ""
    low, high = (min(heights), max(heights)) if heights else (0.0, 1.0)
    high = high if high > low else low + 1
    count = max(map(len, series.values())) - 1 or 1

    def place(step: int, value: float) -> str:
        x = LEFT + step / count * (WIDTH - LEFT - 8)
        y = 8 + (high - value) / (high - low) * (HEIGHT - BOTTOM - 16)
        return f"{x:.1f},{y:.1f}"

    drawn = []
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        y = float(place(0, value).partition(",")[2])
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y}" y2="{y}" class="grid"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.4g}</text>')
    for number, parts in enumerate(shown.values()):
        for points in parts:
            path = " ".join(place(step, value) for step, value in points)
            drawn.append(f'<polyline points="{path}" class="line c{number}"/>')
    for number, (step, text) in enumerate(marks):
        x, y = map(float, place(step, high).split(","))
        side, anchor = (-4, "end") if 2 * step > count else (4, "start")
        drawn.append(f'<line x1="{x}" x2="{x}" y1="{y}" y2="{HEIGHT - BOTTOM - 8}" class="mark"/>')
        drawn.append(
            f'<text x="{x + side:.1f}" y="{y + 12 + 14 * number:.1f}" text-anchor="{anchor}" class="mark">{text}</text>'
        )
    drawn.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">step 0</text>')
    drawn.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 8}" text-anchor="end">step {count}</text>')
    return _figure(WIDTH, HEIGHT, label, drawn) + _legend(list(shown))


def _parts_of(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Return the points between values that are not finite."""
    parts: list[list[tuple[int, float]]] = [[]]
    for step, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            parts.append([])
        elif value is not None:
            parts[-1].append((step, value))
    return [points for points in parts if points]


def _mark_of(values: Sequence[float | None]) -> tuple[int, str] | None:
    """Return the first step whose value is not finite, with what is said of it; None where all are finite."""
    known = [(step, math.isfinite(value)) for step, value in enumerate(values) if value is not None]
    first = next((step for step, finite in known if not finite), None)
    if first is None:
        return None
    again = any(finite for step, finite in known if step > first)
    return first, f"not finite {'in' if again else 'from'} step {first}"


def bars(rows: Mapping[str, Mapping[str, float]], *, label: str, unit: str) -> str:
    """Return a chart with one bar per row, made of parts.

    Args:
        rows: values of the parts by the name of the row; the same parts in each.
        label: of the chart.
        unit: of the values.
    """
    largest = max((sum(parts.values()) for parts in rows.values()), default=0.0)
    if not largest:
        return ""
    drawn, names = [], list(next(iter(rows.values())))
    for number, (name, values) in enumerate(rows.items()):
        y, x = number * ROW, 0.0
        drawn.append(f'<text x="0" y="{y + 11}">{escape(name)}: {sum(values.values()):.4g} {unit}</text>')
        for place, part in enumerate(names):
            width = values[part] / largest * WIDTH
            title = f"<title>{escape(part)}: {values[part]:.4g} {unit}</title>"
            shape = f'x="{x:.1f}" y="{y + 15}" width="{width:.1f}" height="13"'
            drawn.append(f'<rect {shape} class="bar c{place}">{title}</rect>')
            x += width
    return _figure(WIDTH, len(rows) * ROW, label, drawn) + _legend(names)


def _figure(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    text = escape(label)
    return (
        f'<figure><figcaption>{text}</figcaption><svg viewBox="0 0 {width} {height}" role="img" aria-label="{text}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _legend(names: Sequence[str]) -> str:
    items = "".join(f'<li><i class="key c{number}"></i>{escape(name)}</li>' for number, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'
