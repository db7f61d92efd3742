"""Write docs/planner.md and its pictures again: every published run against what the planner predicts of it.

PYTHONPATH=. python .ci/planner_page.py
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / ".ci" / "pictures"), str(ROOT / "benchmarks" / "published"), str(ROOT / "benchmarks")]

import planner_memory  # noqa: E402
from compare_times import (  # noqa: E402
    Comparison,
    compare,
    errors,
    fastest_is_tied,
    groups_of,
    layout_text,
    rank_correlation,
    size_text,
    source_of,
)
from scatter import draw_scatter  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402

TEXT = Path(__file__).with_name("planner_page.md")
PAGE = ROOT / "docs" / "planner.md"
PICTURES = ROOT / "docs" / "pictures"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def by_source(comparisons: Sequence[Comparison]) -> str:
    """Errors of each source."""
    rows = []
    for source, group in groups_of(comparisons, source_of).items():
        found, signed = errors(group), [each.error for each in group]
        numbers = (found.mean(), np.median(found), np.quantile(found, 0.95))
        rows.append([source, str(len(group)), *(f"{value:.1%}" for value in numbers), f"{np.mean(signed):+.1%}"])
    return table(["source", "runs", "mean error", "median", "95 % under", "mean, signed"], rows)


def by_day(comparisons: Sequence[Comparison]) -> str:
    """Orders of layouts measured on one day."""
    rows = []
    for day, group in groups_of(comparisons, lambda each: each.run.group).items():
        if "prequel" in day and len(group) > 2:
            seconds = spearmanr([each.measured for each in group], [each.predicted.seconds for each in group])[0]
            tied = "yes" if fastest_is_tied(group) else "no"
            rows.append(
                [day.split(" | ")[-1], str(len(group)), f"{seconds:.2f}", f"{rank_correlation(group):.2f}", tied]
            )
    head = ["day", "layouts", "correlation of step times", "of times per operation", "fastest among the tied best"]
    return table(head, rows)


def sc21_orders(comparisons: Sequence[Comparison]) -> str:
    """Rank correlations of the two tables of SC'21."""
    rows = []
    for name, group in groups_of(comparisons, lambda each: each.run.group).items():
        if name.startswith("SC'21"):
            rows.append([name, str(len(group)), f"{errors(group).mean():.1%}", f"{rank_correlation(group):.2f}"])
    return table(["table", "runs", "mean error", "rank correlation of times per operation"], rows)


def worst(comparisons: Sequence[Comparison]) -> str:
    """The ten rows with the largest errors."""
    rows = []
    for each in sorted(comparisons, key=lambda each: -abs(each.error))[:10]:
        where = ", ".join(each.run.group.split(" | ")[1:])
        seconds = (f"{each.measured:.1f} s", f"{each.predicted.seconds:.1f} s")
        rows.append([f"{each.run.model}, {layout_text(each)}", *seconds, f"{each.error:+.0%}", where])
    return table(["run", "measured", "predicted", "error", "table"], rows)


def repeated(comparisons: Sequence[Comparison]) -> str:
    """How far runs of one and the same layout lie apart."""
    same = groups_of(comparisons, lambda each: repr((each.run.costs, each.run.layout, each.run.hardware.name)))
    groups = [[each.measured for each in group] for group in same.values() if len(group) > 1]
    found = [abs(value / np.mean(group) - 1) for group in groups for value in group]
    return (
        f"{len(found)} runs repeat a layout that another run has too; their mean distance from the mean of such a "
        f"group\n  is {np.mean(found):.1%}, the largest {max(found):.0%}."
    )


def memory_by_source() -> str:
    """Errors of predicted peaks by source."""
    groups: dict[str, list[float]] = {}
    for run, _, error in planner_memory.errors():
        groups.setdefault(run.group.split(" | 20")[0].split(" (")[0].replace(" | ", ", "), []).append(error)
    rows = []
    for source, found in groups.items():
        numbers = (np.mean(np.abs(found)), np.max(np.abs(found)))
        rows.append([source, str(len(found)), *(f"{value:.1%}" for value in numbers), f"{np.mean(found):+.1%}"])
    return table(["source", "runs", "mean error", "largest", "mean, signed"], rows)


def memory_worst() -> str:
    """The ten largest errors of predicted peaks."""
    rows = []
    for run, size, error in sorted(planner_memory.errors(), key=lambda each: -abs(each[2]))[:10]:
        sizes = (f"{run.memory / 1e9:.1f} GB", f"{size / 1e9:.1f} GB", f"{error:+.0%}")
        rows.append([f"{run.model}, {size_text(run)}", *sizes, ", ".join(run.group.split(" | ")[1:])])
    return table(["run", "measured", "predicted", "error", "table"], rows)


def misjudged() -> str:
    """Runs that worked and are refused, and those that ran out of memory and are accepted."""
    rows = []
    for title, runs in zip(("worked, called impossible", "ran out, accepted"), planner_memory.misjudged(), strict=True):
        for run in runs:
            predicted, capacity = planner_memory.predict(run).least / 1e9, run.hardware.memory / 1e9
            sizes = (f"{predicted:.1f} GB", f"{capacity:.1f} GB")
            rows.append([title, f"{run.model}, {size_text(run)}", *sizes])
    return table(["what happened", "run", "predicted least", "device"], rows)


def page() -> str:
    """Return the text of the page."""
    comparisons = compare()
    known = [each for each in comparisons if each.run.known_shape]
    found, peaks = errors(known), planner_memory.errors()
    values = {
        "known": str(len(known)),
        "all": str(len(comparisons)),
        "mean": f"{found.mean():.1%}",
        "p95": f"{np.quantile(found, 0.95):.0%}",
        "by_source": by_source(comparisons),
        "by_day": by_day(comparisons),
        "sc21": sc21_orders(comparisons),
        "worst": worst(comparisons),
        "repeated": repeated(comparisons),
        "memory_runs": str(len(peaks)),
        "memory_mean": f"{np.mean([abs(error) for *_, error in peaks]):.1%}",
        "memory_by_source": memory_by_source(),
        "memory_worst": memory_worst(),
        "misjudged": misjudged(),
    }
    text = TEXT.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", value)
    assert "{{" not in text, text[text.index("{{") :][:40]
    return text


def pictures() -> dict[str, str]:
    """Return the pictures of the page by name."""
    points = {
        source: [(each.measured, each.predicted.seconds) for each in group]
        for source, group in groups_of(compare(), lambda each: source_of(each).split(",")[0]).items()
    }
    peaks: dict[str, list[tuple[float, float]]] = {}
    for run, size, _ in planner_memory.errors():
        assert run.memory is not None
        peaks.setdefault(run.source.split("@")[0], []).append((run.memory / 1e9, size / 1e9))
    return {
        "planner_time": draw_scatter("Seconds of one step: published runs", lambda value: f"{value:g} s", points),
        "planner_memory": draw_scatter("Peak memory of a device: published runs", lambda value: f"{value:g} GB", peaks),
    }


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for name, picture in pictures().items():
        (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")
