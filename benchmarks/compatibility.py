"""Train random architectures from transformers over stages and tensor ranks, and compare them with one process.

    python benchmarks/compatibility.py --write benchmarks/compatibility.md

Each is built tiny from its own configuration by general rules (tests/models/sampled/architectures.py), and its
step is run in one process, unpartitioned and partitioned into stages. A Trainer trains each on two tensor ranks, and
some of them over stages as well.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

TIMEOUT_SECONDS = 120
OUTCOMES = ("parity", "refused", "failed", "wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40, help="how many architectures")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="numbers of stages")
    parser.add_argument("--trained", type=int, default=6, help="how many of them a Trainer trains")
    parser.add_argument("--write", type=Path, help="file of the report; printed if not given")
    options = parser.parse_args()
    from models.sampled import architectures as drawn

    rows: list[tuple[str, str, dict[int, Any]]] = []
    again: list[tuple[str, str, str]] = []
    for name, class_name in drawn.candidates(options.seed):
        if len(rows) == options.count:
            break
        results = in_a_child(functools.partial(trials, class_name, options.stages))
        if isinstance(results, str):
            again.append((name, class_name, results))
        else:
            rows.append((name, class_name, results))
            print(name, class_name, *(trial.outcome for trial in results.values()), file=sys.stderr, flush=True)
    tensor = tensor_trials([class_name for _, class_name, _ in rows])
    trained = [(row[1], *trained_rows(row[1])) for row in rows[: options.trained]]
    report = text_of(rows, again, trained, tensor, options)
    if options.write is None:
        print(report)
    else:
        options.write.write_text(report)


def trials(class_name: str, stages: Sequence[int]) -> Any:
    """A trial for each number of stages, or why there is none."""
    import logging

    from harness import sampled_parity as drawn_parity
    from models.sampled.architectures import Unavailable, make

    logging.disable(logging.CRITICAL)
    try:
        return {number: drawn_parity.compare(*make(class_name), number) for number in stages}
    except Unavailable as error:
        return str(error)


def in_a_child(function: Callable[[], Any]) -> Any:
    """What a function returns, called in a forked process; a text if that died or took too long."""

    def run(connection: Connection) -> None:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        connection.send(function())

    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=run, args=(theirs,))
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(TIMEOUT_SECONDS) else f"more than {TIMEOUT_SECONDS} s"
    except EOFError:
        return "its process died"
    finally:
        child.kill()
        child.join()


def tensor_trials(class_names: Sequence[str]) -> dict[str, Any]:
    """The outcome of each architecture on two tensor ranks."""
    from harness.sampled_tensor_parallel import tensor_trial
    from harness.worlds.worlds_plugin import Worlds

    worlds = Worlds(capture=True)
    found = {}
    for name in class_names:
        found[name] = tensor_trial(name, worlds.run)
        print(name, "on 2 tensor ranks:", found[name].outcome, found[name].cut.share, file=sys.stderr, flush=True)
    worlds.stop()
    return found


def trained_rows(class_name: str) -> list[str]:
    """The precision, and the outcome of training under each layout."""
    from lightning_hybrid.verify import LAYOUTS, Experiment, Verification
    from models.sampled.modules import data_of, module_of

    numbers = in_a_child(functools.partial(precision, class_name))
    experiment = Experiment(
        make_module=functools.partial(module_of, class_name),
        make_data=functools.partial(data_of, class_name),
        steps=3,
        precision=numbers,
    )
    verification = Verification(experiment)
    reports = [verification.check(layout) for layout in LAYOUTS if layout.num_stages > 1]
    return [numbers, *(report.outcome + (f": {report.message}" if report.message else "") for report in reports)]


def precision(class_name: str) -> str:
    from models.sampled.modules import precision_of

    return precision_of(class_name)


def text_of(
    rows: list[Any], again: list[Any], trained: list[Any], tensor: dict[str, Any], options: argparse.Namespace
) -> str:
    """The report in Markdown."""
    from importlib.metadata import version

    from lightning_hybrid.verify import LAYOUTS

    layouts = [layout.name for layout in LAYOUTS if layout.num_stages > 1]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers"))
    lines = [
        "# Compatibility",
        "",
        "Written by `python benchmarks/compatibility.py --write benchmarks/compatibility.md`"
        f" on {time.strftime('%Y-%m-%d')} with {versions}; CPU.",
        "",
        f"{options.count} architectures were selected at random (seed {options.seed}) from the configurations of"
        " transformers, each with one of its model classes. Each is built tiny from its own configuration by rules for"
        " the names of its fields, and inputs are made from the parameters of its `forward`; no rule knows an"
        " architecture. Its step is run in one process, unpartitioned and partitioned into stages; while a stage runs,"
        " the parameters of the others are NaN. *Parity*: the loss and every gradient match, within 1e-10 in float64"
        " and 1e-5 in float32, or a hundred times what a change of the parameters' last bits does, and never more than"
        " 1e-3. *Refused*: an error of this package that states what to change. *Failed*: any other. *Wrong*: other"
        " numbers. Faults found with seed 0, which the tests use, have been corrected; other seeds select"
        " architectures that were not used in development.",
        "",
        "On two tensor ranks a Trainer trains two steps, against one process, in float32 where the model computes in"
        " float32; losses, logged values and the update of every parameter are the same.",
        "",
        "| | " + " | ".join(OUTCOMES) + " |",
        "|---|" + "---|" * len(OUTCOMES),
    ]
    for number in options.stages:
        counts = Counter(results[number].outcome for _, _, results in rows)
        lines.append(f"| {number} stages | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + " |")
    counts = Counter(trial.outcome for trial in tensor.values())
    lines.append("| 2 tensor ranks | " + " | ".join(str(counts[outcome]) for outcome in OUTCOMES) + " |")
    lines += ["", *shares(tensor)]
    if trained:
        lines += ["", "## Trained over stages", "", f"The first {len(trained)} by a Trainer on processes, three steps,"]
        lines[-1] += " against one process: losses, logged values and the update of every parameter."
        lines[-1] += " In float32 where the model computes its loss in float32, even if its parameters are float64."
        lines += ["", "| class | precision | " + " | ".join(layouts) + " |", "|---|---|" + "---|" * len(layouts)]
        lines += ["| " + " | ".join(map(plain, row)) + " |" for row in trained]
    lines += ["", "## Results", ""]
    heads = [f"{number} stages" for number in options.stages]
    heads += ["largest gradient error", "noise", "2 tensor ranks", "sharded"]
    lines += ["| architecture | class | numbers | " + " | ".join(heads) + " |"]
    lines += ["|---|---|---|" + "---|" * len(heads)]
    for name, class_name, results in rows:
        each = list(results.values())
        cells = [name, class_name, each[0].dtype, *(trial.outcome for trial in each)]
        cells += [figure(each), f"{max(t.noise for t in each):.0e}", tensor[class_name].outcome]
        lines.append("| " + " | ".join([*cells, percent(tensor[class_name].cut.share)]) + " |")
    missed = [
        f"- {name}, {number} stages: {trial.outcome}: {plain(trial.message)}"
        for name, _, results in rows
        for number, trial in results.items()
        if trial.outcome != "parity"
    ]
    missed += [
        f"- {name}, 2 tensor ranks: {tensor[class_name].outcome}: {plain(tensor[class_name].message)}"
        for name, class_name, _ in rows
        if tensor[class_name].outcome != "parity"
    ]
    if missed:
        lines += ["", "## Why not", "", *missed]
    lines += ["", "## What is not sharded", "", "Weights of layers, in elements, that are not sharded as pairs:", ""]
    for name, class_name, _ in rows:
        why = sorted(tensor[class_name].cut.why.items(), key=lambda item: -item[1])
        if why:
            lines.append(f"- {name}: " + "; ".join(f"{plain(reason)} ({count})" for reason, count in why))
    lines += [
        "",
        "## Replaced selections",
        "",
        (f"{len(again)} further selections could not be built, or not run in one process, by these rules:"),
    ]
    lines += ["", *(f"- {name} ({class_name}): {plain(why)}" for name, class_name, why in again)]
    return "\n".join(lines) + "\n"


def shares(tensor: dict[str, Any]) -> list[str]:
    """How much of the layers is cut as pairs, over all architectures."""
    cuts = [trial.cut for trial in tensor.values() if trial.cut.share is not None]
    whole, without = [c.share for c in cuts], [c.share_without_experts for c in cuts]
    full = sum(share == 1 for share in without)
    return [
        "*Sharded*: the share of the weights of attentions, MLPs and convolutions in the layers that is sharded as"
        " pairs (one sum over ranks for both) or, for stacked experts, by width; neither gathered nor full. It is"
        f" {mean(whole)} on average over {len(cuts)} architectures, and {mean(without)} without stacked experts that"
        f" stay full on tensor ranks; {full} architectures are fully sharded except for those. Layers that the step"
        " does not call are left out."
    ]


def mean(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return percent(sum(known) / len(known)) if known else ""


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def figure(each: Sequence[Any]) -> str:
    """The largest error among those that ran."""
    ran = [trial.gradient_error for trial in each if trial.outcome in ("parity", "wrong")]
    return f"{max(ran):.0e}" if ran else ""


def plain(text: str) -> str:
    """One line without the place of installed packages."""
    parts = text.replace("\n", " ").split("site-packages/")
    cleaned = "".join([*(part.rsplit(" ", 1)[0] + " " for part in parts[:-1]), parts[-1]])
    return cleaned.replace("<", "&lt;").replace("|", "\\|").replace("[", "\\[")[:240]


if __name__ == "__main__":
    main()
