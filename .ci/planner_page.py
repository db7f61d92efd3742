"""Write docs/planner.md and its pictures again: every published run against what the planner predicts of it.

PYTHONPATH=. python .ci/planner_page.py
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / ".ci" / "pictures"), str(ROOT / "benchmarks" / "published")]

from compare_times import (  # noqa: E402
    Comparison,
    compare,
    errors,
    fastest_is_tied,
    groups_of,
    layout_text,
    rank_correlation,
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


def page() -> str:
    """Return the text of the page."""
    comparisons = compare()
    known = [each for each in comparisons if each.run.known_shape]
    found = errors(known)
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
    title = "Seconds of one step: published runs"
    return {"planner_time": draw_scatter(title, lambda value: f"{value:g} s", points)}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for name, picture in pictures().items():
        (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")
