"""Write docs/planner.md, its pictures and benchmarks/published/predictions.md: published runs against predictions.

PYTHONPATH=. python .ci/planner_page.py
"""

import functools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / ".ci" / "pictures"), str(ROOT / "benchmarks" / "published"), str(ROOT / "benchmarks")]

import planner_memory  # noqa: E402
from leave_one_out import (  # noqa: E402
    CONSTANT_NAMES,
    PRIORS,
    Comparison,
    Evaluation,
    by_source,
    groups_of,
    mean_error,
    rank_correlation,
    source_of,
    usable_runs,
)
from published_runs import PublishedRun  # noqa: E402
from scatter import draw_scatter  # noqa: E402

from lightning_hybrid.predict.evidence import UNCALIBRATED  # noqa: E402
from lightning_hybrid.predict.layer_time import CONSTANTS  # noqa: E402
from lightning_hybrid.predict.plans import TIME_ERROR  # noqa: E402

CI = Path(__file__).parent
TARGETS = {
    CI / "planner_page.md": ROOT / "docs" / "planner.md",
    CI / "predictions_page.md": ROOT / "benchmarks" / "published" / "predictions.md",
}
PICTURES = ROOT / "docs" / "pictures"
KINDS = "dense", "mixtures"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


@functools.cache
def evaluation() -> Evaluation:
    """The fit of all runs, and those without a source."""
    return Evaluation(usable_runs())


def of_kind(comparisons: Iterable[Comparison], kind: str) -> list[Comparison]:
    """Those of dense models, or of mixtures."""
    return [each for each in comparisons if each.kind == kind]


def sources() -> str:
    """Errors of each source, seen and left out."""
    seen = groups_of(evaluation().fitted, by_source)
    rows = []
    for source, group in groups_of(evaluation().unseen, by_source).items():
        errors = mean_error(seen[source]), mean_error(group)
        signed = f"{np.mean([each.error for each in group]):+.1%}"
        order = f"{rank_correlation(group):.2f}" if len(group) > 3 else ""
        rows.append([source, str(len(group)), *(f"{error:.1%}" for error in errors), signed, order])
    return table(["source", "runs", "mean error", "left out", "left out, signed", "order"], rows)


def by_table() -> str:
    """Errors of each table of a source."""
    rows = []
    for name, group in groups_of(evaluation().fitted, lambda each: each.run.group).items():
        rows.append([name, str(len(group)), f"{mean_error(group):.1%}", f"{np.mean([e.error for e in group]):+.1%}"])
    return table(["table", "runs", "mean error", "mean, signed"], rows)


def constants() -> str:
    """What is fitted, with its prior and the sources that say most about it."""
    rows = []
    for name, (mean, deviation) in PRIORS.items():
        value = evaluation().whole.values[name]
        carried = list(evaluation().linear.carried_by(name).items())[:3]
        words = ", ".join(f"{source} {share:.0%}" for source, share in carried if share >= 0.1)
        rows.append([name.replace("_", " "), f"{value:.3g}", f"{mean:g} ± {deviation:.0%}", words])
    return table(["constant", "value", "prior", "carried by"], rows)


def size_text(run: PublishedRun) -> str:
    """The sizes of a run's layout that are not 1."""
    layout = run.layout
    sizes = {"tp": layout.tensor, "pp": layout.pipeline, "dp": layout.data, "cp": layout.context, "ep": layout.expert}
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    if layout.zero_stage:
        words.append(f"ZeRO-{layout.zero_stage}")
    if layout.offload:
        words.append("offload")
    return " ".join([*words, f"microbatch {layout.microbatch}", f"batch {layout.batch}"])


def worst() -> str:
    """The rows with the largest errors."""
    rows = []
    for each in sorted(evaluation().fitted, key=lambda each: -abs(each.error))[:15]:
        where = ", ".join(each.run.group.split(" | ")[1:]) or each.run.group
        seconds = f"{each.run.seconds:.1f} s", f"{each.seconds:.1f} s"
        rows.append([f"{each.run.model}, {size_text(each.run)}", *seconds, f"{each.error:+.0%}", where])
    return table(["run", "measured", "predicted", "error", "table"], rows)


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


def inside(comparisons: Iterable[Comparison]) -> str:
    """The share of runs left out that the bar of an uncalibrated plan contains."""
    found = [abs(1 / (1 + each.error) - 1) <= UNCALIBRATED[each.kind] for each in comparisons]
    return f"{np.mean(found):.0%}"


def pages() -> dict[Path, str]:
    """The text of the page and of the full report, by their paths."""
    seen, unseen, peaks = evaluation().fitted, evaluation().unseen, planner_memory.errors()
    fitted = evaluation().whole.values
    values = {
        "runs": str(len(seen)),
        "fitted": f"{mean_error(seen):.1%}",
        "inside": inside(unseen),
        "left_no_v100": f"{mean_error(e for e in of_kind(unseen, 'dense') if 'v100' not in e.run.hardware.name):.1%}",
        "by_source": sources(),
        "by_table": by_table(),
        "worst": worst(),
        "bar_compared": f"{TIME_ERROR:.0%}",
        "constants": constants(),
        "devices": ", ".join(f"{name} {value:.2f}" for name, value in fitted.items() if name not in PRIORS),
        "memory_runs": str(len(peaks)),
        "memory_mean": f"{np.mean([abs(error) for *_, error in peaks]):.1%}",
        "memory_by_source": memory_by_source(),
        "memory_worst": memory_worst(),
        "misjudged": misjudged(),
        **{name: f"{getattr(CONSTANTS, name):g}" for name in CONSTANT_NAMES},
    }
    for kind in KINDS:
        values[f"left_{kind}"] = f"{mean_error(of_kind(unseen, kind)):.1%}"
        values[f"fitted_{kind}"] = f"{mean_error(of_kind(seen, kind)):.1%}"
        values[f"order_{kind}"] = f"{rank_correlation(of_kind(unseen, kind)):.2f}"
        values[f"inside_{kind}"] = inside(of_kind(unseen, kind))
        values[f"bar_{kind}"] = f"{UNCALIBRATED[kind]:.0%}"
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
        source: [(each.run.seconds, each.seconds) for each in group]
        for source, group in groups_of(evaluation().fitted, lambda each: source_of(each.run)).items()
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
