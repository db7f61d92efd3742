"""The plans as one self-contained page of HTML: ranked plans, memory of the ranks, the schedule, reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from lightning_hybrid.predict.layout import spelled
from lightning_hybrid.predict.plans import Plan
from lightning_hybrid.predict.report import PlannedRun, rank_name, ranked_rows
from lightning_hybrid.schedule import chain, make_schedule, simulate, to_svg
from lightning_hybrid.text import sized, timed

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#eeca3b", "#72b7b2", "#9d755d", "#ff9da6", "#bab0ac")
_MOST_RANKS, _MOST_MICROBATCHES = 16, 24  # in pictures
_STYLE = Path(__file__).with_name("page.css")


def html_report(run: PlannedRun, most: int = 5) -> str:
    """Return the page, which loads nothing from another host."""
    plans, best = run.result.plans[:most], run.result.best
    costs = run.costs
    parts = [
        f"<h1>{escape(run.title)}</h1>",
        f"<p>{run.result.evaluated:,} layouts were predicted, for a step of {best.layout.batch:,} samples"
        + (f" of {costs.positions:,} tokens" if costs.positions > 1 else "")
        + f" and {sized(best.memory.capacity)} of memory per device.</p>",
        "<h2>Plans</h2>",
        _plans(run, most),
        f"<h2>Time of {best.layout.batch:,} samples</h2>",
        *_bars([_time_row(plan, best) for plan in plans], None),
        "<h2>Memory of a rank, chosen plan</h2>",
        "<p>The line is the memory of a device. What the allocator keeps for later, and gives back before it fails, is"
        f" counted: the peak is {sized(best.memory.peak)}, and {sized(best.memory.least)} are needed.</p>",
        *_bars(_memory_rows(best), best.memory.capacity),
        *_schedule(best),
        f"<h2>Why not{run.compared_samples(most)}</h2>",
        _table(
            ("family", "reason"),
            [(escape(rejection.family), escape(rejection.reason)) for rejection in run.result.rejected],
        ),
        "<h2>Trainer</h2>",
        f"<pre><code>{escape(run.trainer_arguments(best))}</code></pre>",
        *(f"<p>Note: {escape(note)}.</p>" for note in costs.notes),
    ]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(costs.name)}: plan</title>'
        f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _code(text: str) -> str:
    """A layout that may be broken behind its commas."""
    return f"<code>{escape(text).replace(',', ',<wbr>')}</code>"


def _plans(run: PlannedRun, most: int) -> str:
    head, *rows = ranked_rows(run, most)
    kinds = ["", "", *["number"] * (len(head) - 3), ""]
    names = "".join(f'<th class="{kind}">{escape(name)}</th>' for kind, name in zip(kinds, head, strict=True))
    lines = [f"<tr>{names}</tr>"]
    for number, layout, *values, reason in rows:
        cells = ""
        for value, _, error in (each.partition(" ± ") for each in values):
            mark = f' <span class="error">± {error}</span>' if error else ""
            cells += f'<td class="number">{value}{mark}</td>'
        lines.append(
            f'<tr class="{"chosen" if number == "1" else ""}"><td>{number}</td><td>{_code(layout)}</td>'
            f"{cells}<td>{escape(reason)}</td></tr>"
        )
    return f"<table>{''.join(lines)}</table>"


def _time_row(plan: Plan, best: Plan) -> tuple[str, Mapping[str, float], str]:
    """Layout, terms and total of the time that a plan takes for as many samples as the best one."""
    assert plan.time is not None
    scale = best.layout.batch / plan.time.samples
    terms = {name: scale * seconds for name, seconds in plan.time.terms.items()}
    return spelled(plan.layout), terms, timed(scale * plan.time.seconds)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _memory_rows(plan: Plan) -> list[tuple[str, Mapping[str, float], str]]:
    """Name, terms and total of each pipeline rank; of many, those at even distances."""
    ranks = plan.memory.ranks
    step = -(-len(ranks) // _MOST_RANKS)
    shown = sorted({*range(0, len(ranks), step), len(ranks) - 1})
    return [(rank_name(rank, plan), ranks[rank], sized(sum(ranks[rank].values()))) for rank in shown]


def _bars(rows: Sequence[tuple[str, Mapping[str, float], str]], mark: float | None) -> list[str]:
    """Return a legend, and a bar of stacked terms for each row, with a line at ``mark``."""
    totals: dict[str, float] = {}
    for _, terms, _ in rows:
        for name, value in terms.items():
            totals[name] = totals.get(name, 0.0) + value
    shown = [name for name, value in totals.items() if value > 0.002 * sum(totals.values())]
    colors = {name: _COLORS[number % len(_COLORS)] for number, name in enumerate(shown)}
    largest = max([sum(terms.values()) for _, terms, _ in rows] + ([] if mark is None else [mark])) * 1.02
    lines = [
        '<div class="legend">'
        + "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in colors.items())
        + "</div>"
    ]
    for label, terms, total in rows:
        left, spans = 0.0, ""
        for name in shown:
            width = 100 * terms.get(name, 0.0) / largest
            title = escape(f"{name}: {terms.get(name, 0.0) / (sum(terms.values()) or 1):.1%}")
            style = f"left:{left:.3f}%;width:{width:.3f}%;background:{colors[name]}"
            spans += f'<span title="{title}" style="{style}"></span>'
            left += width
        if mark is not None:
            spans += f'<b style="left:{100 * mark / largest:.3f}%"></b>'
        lines.append(f'<div class="row">{_code(label)}<div class="bar">{spans}</div><span>{total}</span></div>')
    return lines


def _schedule(plan: Plan) -> list[str]:
    """Return the swim-lanes of a plan with several stages; with fewer microbatches where its schedule is long."""
    layout, time = plan.layout, plan.time
    if layout.pipeline == 1 or layout.pipeline > 2 * _MOST_RANKS or time is None:
        return []
    most = max(_MOST_MICROBATCHES // layout.stages_per_rank, layout.pipeline)
    count = min(layout.num_microbatches, most)
    schedule = make_schedule(layout.schedule, layout.pipeline, count, layout.stages_per_rank, widths=layout.widths)
    names = "computation", "recomputation", "tensor ranks", "context ranks", "spatial ranks"
    work = sum(time.terms.get(name, 0.0) for name in names)
    forward = work / layout.num_microbatches / layout.stages_per_rank / (3 + layout.forwards)
    forwards = [forward * width for width in layout.widths or [1] * schedule.num_stages]
    backwards = [seconds * (2 + layout.forwards) for seconds in forwards]
    timeline = simulate(schedule, chain(schedule.num_stages), forward_seconds=forwards, backward_seconds=backwards)
    name = f"{layout.schedule}, {layout.pipeline} ranks"
    shown = (
        ""
        if count == layout.num_microbatches
        else f" {count} microbatches are drawn of {layout.num_microbatches}, so that the bubble is larger here."
    )
    return [
        "<h2>Schedule, chosen plan</h2>",
        f"<p>Stages of equal cost per rank, without messages.{shown}</p>",
        to_svg(timeline, name),
    ]
