"""The command ``lightning-hybrid explain path.to:Module --layout pp=2,tp=2``: the plan of a run, without the run."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_hybrid.cli.classes import FLAGS
from lightning_hybrid.cli.command import OK, REFUSED, add_command, print_json
from lightning_hybrid.cli.module import (
    STATUSES,
    add_layout_to,
    data_and_device_errors,
    layout_and_classes,
    print_memory,
    refusals,
)
from lightning_hybrid.cli.progress import Progress
from lightning_hybrid.text import print_table, wrapped

if TYPE_CHECKING:
    from lightning_hybrid.graph.partition import Assignment
    from lightning_hybrid.verify import Layout

_EXAMPLE = f"""example:
  lightning-hybrid explain train.py:Classifier --layout pp=2,tp=2
  lightning-hybrid explain main.py --config config.yaml

{STATUSES}"""


_EVEN = 0.8  # of its time that a pipeline rank of mean cost works while the slowest one does


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = add_command(
        commands,
        "explain",
        run,
        text="show how a module would be partitioned under a layout, without training",
        description="Records the training step on one batch, in one process on the CPU for any number of ranks, and"
        " prints the units with their share of the cost, the stages, plans for tensor ranks, experts, or the reason"
        f" why the step cannot be run under the layout. No step is trained. {FLAGS}",
        example=_EXAMPLE,
    )
    add_layout_to(parser, "pp=2,tp=2")


def run(parsed: argparse.Namespace) -> int:
    """Plan, print the plan, and return the exit status.

    Raises:
        UsageError: An invalid path, layout or argument of a class.
    """
    content: dict[str, Any] = {}
    with Progress("explain") as progress, data_and_device_errors():
        layout, made, precision, _ = layout_and_classes(parsed, progress)
        import torch  # late, since it takes seconds

        torch.manual_seed(0)
        progress.phase("making the module and its data")
        module, data = made.make_module(), made.make_data()
        with refusals(layout, content):
            content |= explain(module, data, layout, precision, on_phase=progress.phase)
    if parsed.json:
        print_json(content)
    else:
        _print(content)
    return OK if content["refused"] is None else REFUSED


def explain(
    module: Any, data: Any, layout: Layout, precision: str, *, on_phase: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Return the plan as plain values; an error of the user's step while it was recorded is printed with its traceback.

    Args:
        module: The user's module; not to be used afterwards.
        data: A LightningDataModule, a loader, or a dict of arguments of ``Trainer.fit``; None if it has its own.
        layout: The layout.
        precision: Lightning's name of the precision.
        on_phase: Receives the name of each phase as it begins.
    """
    from lightning_hybrid.planning.plan import PlanRequest, make_plan
    from lightning_hybrid.verify.experiment import fit_arguments, namespace_of

    lightning = namespace_of(module)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    arguments = fit_arguments(lightning, data)
    options = layout.options(None)
    run_plan = make_plan(
        lightning, module, arguments, layout.devices, options, precision, PlanRequest(on_phase=on_phase)
    )
    run, refused = run_plan.run, run_plan.refusal
    run_plan.print_error()
    content: dict[str, Any] = {"layout": layout.name, "ranks": layout.devices, "refused": refused, "units": []}
    content |= {"stages": [], "tensor_plans": {}, "experts": "", "may_retry": False, "table": run_plan.table}
    content |= {
        "techniques": list(run_plan.techniques),
        "offloaded": run.setting.options.offloaded,
        "memory": [rank.offloaded_to(run.setting.options.offloaded).sizes for rank in run_plan.memory],
        "memory_without_techniques": [rank.sizes for rank in run_plan.memory_without_techniques],
    }
    content["may_retry"] = refused is not None and run_plan.partition is not None and run_plan.partition.may_retry
    plan = run.plan
    if plan is not None and plan.first is not None and refused is None:
        content["units"] = units_of(plan.first.assignment, sizes)
        content["stages"] = stages_of(plan.first.assignment, sizes, plan.rank_of)
    content["tensor_plans"] = {fqn: list(each.lines()) for fqn, each in run.plans.items()}
    from lightning_hybrid.techniques.experts import ExpertParallel

    if (experts := run.technique(ExpertParallel)) is not None:
        content["experts"] = experts.summary
    return content


def units_of(assignment: Assignment, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Return each unit and, as unit None, the other operations of each stage, in the order of the step."""
    from lightning_hybrid.graph.partition import node_cost

    graph = assignment.graph
    costs: dict[tuple[int, str], float] = {}
    names: dict[tuple[int, str], set[str]] = {}
    for node, stage in zip(graph.nodes, assignment.node_stage, strict=True):
        key = stage, node.unit
        costs[key] = costs.get(key, 0.0) + node_cost(node, graph)
        names.setdefault(key, set()).update(node.parameters)
    total = sum(costs.values()) or 1.0
    return [
        {
            "unit": unit or None,
            "stage": stage,
            **_sizes(names[stage, unit], graph.parameter_bytes, sizes),
            "cost_share": cost / total,
        }
        for (stage, unit), cost in sorted(costs.items(), key=lambda item: item[0][0])
    ]


def stages_of(assignment: Assignment, sizes: dict[str, int], rank_of: Callable[[int], int]) -> list[dict[str, Any]]:
    """Return the stages: rank, parameters before tensor ranks, experts and ZeRO shard them, cost, messages."""
    graph, costs = assignment.graph, assignment.costs()
    stages = []
    for stage in range(assignment.num_stages):
        names = {name for name, holders in assignment.holders.items() if stage in holders}
        sends = {
            str(target): sum(graph.values[value].nbytes for value in sent)
            for (source, target), sent in assignment.portals.items()
            if source == stage
        }
        stages.append(
            {
                "stage": stage,
                "pipeline_rank": rank_of(stage),
                **_sizes(names, graph.parameter_bytes, sizes),
                "cost_share": costs[stage] / (sum(costs) or 1.0),
                "sends_bytes": sends,
            }
        )
    return stages


def _sizes(names: set[str], num_bytes: Any, sizes: dict[str, int]) -> dict[str, int]:
    """Return the number of parameters, and their bytes, without buffers."""
    own = names & sizes.keys()
    return {"parameters": sum(sizes[name] for name in own), "bytes": sum(num_bytes[name] for name in own)}


def balance_line(units: list[dict[str, Any]], stages: list[dict[str, Any]]) -> str:
    """Return a line on ranks of uneven costs, with the nearest number of ranks whose costs are even; "" if they are."""
    from lightning_hybrid.graph.partition import balance

    costs, of_ranks = [unit["cost_share"] for unit in units], Counter[int]()
    for stage in stages:
        of_ranks[stage["pipeline_rank"]] += stage["cost_share"]
    count, largest = len(of_ranks), max(of_ranks.values())
    if count * largest <= 1 / _EVEN:
        return ""
    for fewer in range(count - 1, 0, -1):
        cuts = [*balance(costs, fewer), len(costs)]
        share = max(sum(costs[start:end]) for start, end in itertools.pairwise(cuts))
        if fewer * share <= 1 / _EVEN:
            break
    better = f"the nearest good one is pp={fewer} (at most {share:.0%})" if fewer > 1 else "one rank is better"
    return (
        f"a bad layout: one of {count} pipeline ranks has {largest:.0%} of the cost, and an equal share is"
        f" {1 / count:.0%}, so the others wait {1 - 1 / (count * largest):.0%} of the time; {better}"
    )


def _print(content: dict[str, Any]) -> None:
    if content["refused"] is not None:
        print(wrapped(f"refused: {content['refused']}"))
    if content.get("units"):
        from lightning_hybrid.step.objects.modules import shortened

        rows: list[tuple[str, ...]] = [("unit", "stage", "parameters", "bytes", "cost")]
        for unit in content["units"]:
            rows.append((shortened(unit["unit"] or "(between units)"), str(unit["stage"]), *_numbers(unit)))
        for stage in content["stages"]:
            rows.append((f"stage {stage['stage']} in all", str(stage["stage"]), *_numbers(stage)))
        print_table(rows)
    if content["refused"] is None:
        if content["stages"] and (uneven := balance_line(content["units"], content["stages"])):
            print(wrapped(uneven), end="\n\n")
        _print_memory(content)
        print(wrapped(content["table"]))
    elif "table" in content:
        print("Without strict_layout=True, the ranks would hold shards of all parameters, as under ZeRO-3.")
        if content["may_retry"]:
            print("A run tries again before its first two training batches, when its start hooks have been called.")


def _print_memory(content: dict[str, Any]) -> None:
    """Print the estimated memory of each pipeline rank, with ZeRO, offload and recomputation and without them."""
    several = len(content["memory"]) > 1
    shown = {"bytes of a rank, estimated": content["memory"]}
    if content["memory_without_techniques"] != content["memory"]:
        shown["without ZeRO, offload and recomputation"] = content["memory_without_techniques"]
    for title, each in shown.items():
        ranks = {(f"pipeline rank {number}" if several else "each rank",): sizes for number, sizes in enumerate(each)}
        print_memory([title], ranks, content["offloaded"] if each is content["memory"] else {})


def _numbers(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['parameters']:,}", f"{row['bytes']:,}", f"{100 * row['cost_share']:.1f} %"
