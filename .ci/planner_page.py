"""Write docs/planner.md, its pictures and benchmarks/published/predictions.md: published runs against predictions.

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
from errors_by_term import ordered_pairs, repeats, spread, terms, without_unsteady  # noqa: E402
from runs_not_in_the_fit import compare_others  # noqa: E402
from scatter import draw_scatter  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402

CI = Path(__file__).parent
TARGETS = {
    CI / "planner_page.md": ROOT / "docs" / "planner.md",
    CI / "predictions_page.md": ROOT / "benchmarks" / "published" / "predictions.md",
}
PICTURES = ROOT / "docs" / "pictures"
BOUND = 0.2  # of an error, for 95 % of the runs


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
        counted = f"{np.mean(signed):+.1%}", str(sum(found > BOUND))
        rows.append([source, str(len(group)), *(f"{value:.1%}" for value in numbers), *counted])
    head = ["source", "runs", "mean error", "median", "95 % under", "mean, signed", f"over {BOUND:.0%}"]
    return table(head, rows)


def by_day(comparisons: Sequence[Comparison]) -> str:
    """Orders of layouts measured on one day."""
    rows = []
    for day, group in groups_of(comparisons, lambda each: each.run.group).items():
        if "prequel" in day and len(group) > 2:
            seconds = spearmanr([each.measured for each in group], [each.predicted.seconds for each in group])[0]
            tied = "yes" if fastest_is_tied(group) else "no"
            pairs, right = ordered_pairs(group)
            found = (
                f"{seconds:.2f}",
                f"{rank_correlation(group):.2f}",
                f"{right} of {pairs}",
                f"{2 * right / pairs - 1:.2f}",
            )
            rows.append([day.split(" | ")[-1], str(len(group)), *found, tied])
    head = ["day", "layouts", "correlation of step times", "of times per operation"]
    head += ["pairs over 3 % apart in order", "correlation over these", "fastest among the tied best"]
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


def by_term(comparisons: Sequence[Comparison]) -> str:
    """Terms of the prediction, and how the residual depends on them."""
    rows = []
    for term in terms(comparisons)[0]:
        factor = "" if term.factor is None else f"{term.factor:.2f}"
        correlations = f"{term.correlation:+.2f}", f"{term.within:+.2f}"
        rows.append([term.name, str(term.runs), f"{term.share:.1%}", *correlations, factor])
    return table(["term", "runs over 1 %", "mean share", "correlation", "within sources", "fitted factor"], rows)


def factors_by_source(comparisons: Sequence[Comparison]) -> str:
    """The factor of the tensor ranks' term by the sources that have it."""
    rows = []
    for source, group in groups_of(comparisons, source_of).items():
        found = {term.name: term for term in terms(group)[0]}
        term = found.get("tensor ranks")
        if term and term.share > 0.01 and term.factor is not None:
            rows.append([source, str(term.runs), f"{term.share:.1%}", f"{term.factor:.2f}"])
    return table(["source", "runs over 1 %", "mean share", "fitted factor"], rows)


def repeated(comparisons: Sequence[Comparison]) -> str:
    """How far runs of one and the same layout lie apart, by source."""
    rows = []
    for source, group in groups_of(comparisons, source_of).items():
        groups = [[each.measured for each in same] for same in repeats(group)]
        if groups:
            found = [abs(value / np.mean(same) - 1) for same in groups for value in same]
            numbers = (
                f"{np.mean(found):.1%}",
                f"{np.quantile(found, 0.95):.1%}",
                f"{max(map(spread, repeats(group))):.0%}",
            )
            rows.append([source, str(len(groups)), str(len(found)), *numbers])
    head = [
        "source",
        "layouts repeated",
        "runs",
        "mean distance from their mean",
        "95 % under",
        "largest over smallest",
    ]
    return table(head, rows)


def steady(comparisons: Sequence[Comparison]) -> str:
    """Errors without runs whose repeats lie far apart."""
    layouts, days = without_unsteady(comparisons)
    others = [each for each in comparisons if not each.run.hardware.name.startswith("v100")]
    rows = []
    for title, group in (
        ("all", comparisons),
        ("without layouts whose repeats differ by more than 20 %", layouts),
        ("without the days of one table on which these were measured", days),
        ("without V100", others),
    ):
        found = errors(group)
        numbers = f"{found.mean():.1%}", f"{np.quantile(found, 0.95):.1%}", str(sum(found > BOUND))
        rows.append([title, str(len(group)), *numbers])
    return table(["runs of known shape", "runs", "mean error", "95 % under", f"over {BOUND:.0%}"], rows)


def not_in_the_fit() -> str:
    """Runs that no constant was fitted to."""
    rows = []
    for each in compare_others():
        seconds = f"{each.measured:.2f} s", f"{each.predicted.seconds:.2f} s", f"{each.error:+.0%}"
        recomputed = {"full": ", recomputed", "selective": ", scores recomputed"}.get(each.run.layout.recompute, "")
        rows.append([each.run.source, f"{each.run.model}, {layout_text(each)}{recomputed}", *seconds])
    return table(["source", "run", "measured", "predicted", "error"], rows)


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


def pages() -> dict[Path, str]:
    """The text of the page and of the full report, by their paths."""
    comparisons = compare()
    known = [each for each in comparisons if each.run.known_shape]
    found, peaks = errors(known), planner_memory.errors()
    others = errors(compare_others())
    values = {
        "known": str(len(known)),
        "all": str(len(comparisons)),
        "mean": f"{found.mean():.1%}",
        "p95": f"{np.quantile(found, 0.95):.0%}",
        "by_source": by_source(comparisons),
        "by_day": by_day(comparisons),
        "sc21": sc21_orders(comparisons),
        "worst": worst(comparisons),
        "by_term": by_term(known),
        "factors_by_source": factors_by_source(known),
        "factors_left": f"{terms(known)[1]:.1%}",
        "repeated": repeated(known),
        "steady": steady(known),
        "over": str(sum(found > BOUND)),
        "not_in_the_fit": not_in_the_fit(),
        "others_mean": f"{others.mean():.1%}",
        "memory_runs": str(len(peaks)),
        "memory_mean": f"{np.mean([abs(error) for *_, error in peaks]):.1%}",
        "memory_by_source": memory_by_source(),
        "memory_worst": memory_worst(),
        "misjudged": misjudged(),
    }
    texts = {}
    for template, target in TARGETS.items():
        text = template.read_text(encoding="utf-8")
        for name, value in values.items():
            text = text.replace("{{" + name + "}}", value)
        assert "{{" not in text, text[text.index("{{") :][:40]
        texts[target] = text
    return texts


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
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    for name, picture in pictures().items():
        (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")
