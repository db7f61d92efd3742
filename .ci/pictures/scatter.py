"""A log-log scatter plot of predicted against measured values, with lines of equality and of 20 % error."""

import math
from collections.abc import Callable, Mapping, Sequence

from canvas import BLUE, GREEN, GREY, MUTED, ORANGE, PURPLE, RED, RULE, SKY, WIDTH, Canvas

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)
LEFT, TOP, SIDE = 76, 84, 420


def draw_scatter(title: str, unit: Callable[[float], str], series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw (measured, predicted) points, one colour per series."""
    values = [value for points in series.values() for point in points for value in point]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05
    canvas = Canvas(TOP + SIDE + 64, title)
    canvas.text(24, 32, title, size=16, font_weight=600)
    canvas.text(24, 56, "grey line: equal; dashed: 20 % too high and too low", fill=MUTED)

    def place(measured: float, predicted: float) -> tuple[float, float]:
        x, y = ((math.log10(value) - low) / (high - low) * SIDE for value in (measured, predicted))
        return LEFT + x, TOP + SIDE - y

    canvas.rect(LEFT, TOP, SIDE, SIDE, stroke=RULE, rx=0)
    for tick in _ticks(low, high):
        x, y = place(tick, tick)
        canvas.line((x, TOP + SIDE), (x, TOP + SIDE + 5), colour=RULE)
        canvas.line((LEFT - 5, y), (LEFT, y), colour=RULE)
        canvas.text(x, TOP + SIDE + 22, unit(tick), anchor="middle", fill=MUTED)
        canvas.text(LEFT - 9, y + 5, unit(tick), anchor="end", fill=MUTED)
    for factor, dash in ((1.0, ""), (1.2, "4 4"), (0.8, "4 4")):
        start, end = 10**low * max(1.0, 1 / factor), 10**high * min(1.0, 1 / factor)
        style = {"stroke_dasharray": dash} if dash else {}
        canvas.line(place(start, start * factor), place(end, end * factor), colour=GREY, width=1, **style)
    legend = TOP + 14
    for (name, points), colour in zip(series.items(), COLOURS, strict=False):
        for point in points:
            x, y = place(*point)
            canvas.rect(x - 2.5, y - 2.5, 5, 5, fill=colour, rx=2.5, fill_opacity=0.7)
        canvas.rect(LEFT + SIDE + 20, legend - 9, 10, 10, fill=colour, rx=5)
        for line in _lines(name, 24):
            canvas.text(LEFT + SIDE + 38, legend, line)
            legend += 18
        legend += 8
    canvas.text(LEFT + SIDE / 2, TOP + SIDE + 48, "measured", anchor="middle")
    canvas.text(20, TOP - 10, "predicted")
    assert LEFT + SIDE + 38 < WIDTH
    return canvas.svg()


def _ticks(low: float, high: float) -> list[float]:
    exponents = range(math.floor(low), math.ceil(high) + 1)
    ticks = [mantissa * 10.0**exponent for exponent in exponents for mantissa in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= math.log10(tick) <= high]
    return inside if len(inside) <= 9 else [tick for tick in inside if math.log10(tick).is_integer()]


def _lines(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
