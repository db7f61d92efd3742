"""Predicted against measured memory of tensors on this machine's CPU ranks, for a GPT under 16 layouts.

    PYTHONPATH=. python benchmarks/planner_memory_here.py
    PYTHONPATH=. python benchmarks/planner_memory_here.py --only "two stages" --terms
    PYTHONPATH=. python benchmarks/planner_memory_here.py --recorded

The model and the measurement are those of `memory_table.py`. Each rank's peak of tensors, by `MemoryMonitor`, is held
against the prediction for its pipeline coordinate, without what the framework takes. The costs are those of the
configuration, or with ``--recorded`` those of the module's recorded step, without the layout that is cut by hand.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from memory_table import BATCH, GPT, HEADS, LAYERS, LENGTH, MIB, VOCABULARY, WIDTH, Row, adamw, run_apart, train
from torch.utils.data import DataLoader

from lightning_hybrid.predict.costs.layers import ModelCosts
from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, PlanLayout
from lightning_hybrid.predict.memory import predict_memory
from lightning_hybrid.predict.plans import PredictedMemory

SHAPE = TransformerShape(
    LAYERS, WIDTH, 4 * WIDTH, HEADS, VOCABULARY, LENGTH, has_learned_positions=True, has_tied_embedding=False
)


@dataclass(frozen=True)
class Case:
    """One layout, as the strategy's options and as the planner's."""

    title: str
    devices: int
    options: dict[str, Any]
    layout: PlanLayout
    ranks_per_stage: int = field(default=1)


def case(title: str, devices: int, options: dict[str, Any], microbatch: int, **sizes: Any) -> Case:
    layout = PlanLayout(**{"microbatch": microbatch, "batch": BATCH, "balanced_by": "flops"} | sizes)
    return Case(title, devices, options, layout, layout.ranks // layout.pipeline)


def sharded(stage: int, reshards: bool = False) -> dict[str, Any]:
    return {"shard": 2, "zero_stage": stage, "reshard_after_forward": reshards}


CASES = [
    case("4 microbatches", 1, {"num_microbatches": 4}, 4),
    case("full recomputation", 1, {"recompute": "full"}, 16, recompute="full"),
    case("chunked loss", 1, {"chunked_loss": True}, 16, chunked_loss=True),
    case("two replicas", 2, {}, 8, replicate=2),
    case("two replicas, ZeRO-1", 2, {"zero_stage": 1}, 8, **sharded(1)),
    case("two replicas, ZeRO-2", 2, {"zero_stage": 2}, 8, **sharded(2)),
    case(
        "two replicas, ZeRO-2, resharded, 4 microbatches",
        2,
        {"zero_stage": 2, "num_microbatches": 4, "reshard_after_forward": True},
        2,
        **sharded(2, True),
    ),
    case("two replicas, ZeRO-3", 2, {"zero_stage": 3}, 8, **sharded(3)),
    case("two replicas, ZeRO-3, 4 microbatches", 2, {"zero_stage": 3, "num_microbatches": 4}, 2, **sharded(3)),
    case(
        "two replicas, ZeRO-3, resharded, recomputed",
        2,
        {"zero_stage": 3, "reshard_after_forward": True, "recompute": "full"},
        8,
        **sharded(3, True),
        recompute="full",
    ),
    case("two stages", 2, {"pipeline_parallel_size": 2, "num_microbatches": 4}, 4, pipeline=2),
    case(  # the strategy would cut inside blocks
        "four stages of two blocks",
        4,
        {
            "pipeline_parallel_size": 4,
            "num_microbatches": 8,
            "pipeline_cuts": ["blocks.2", "blocks.4", "blocks.6"],
        },
        2,
        pipeline=4,
        balanced_by="layers",
    ),
    case(
        "two stages, GPipe, recomputed",
        2,
        {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "gpipe", "recompute": "full"},
        4,
        pipeline=2,
        schedule="gpipe",
        recompute="full",
    ),
    case("two tensor ranks", 2, {"tensor_parallel_size": 2}, 16, tensor=2),
    case("two context ranks", 2, {"context_parallel_size": 2}, 16, context=2),
    case(
        "two stages x two replicas, ZeRO-1",
        4,
        {"pipeline_parallel_size": 2, "num_microbatches": 4, "zero_stage": 1},
        2,
        pipeline=2,
        **sharded(1),
    ),
]


def recorded_costs() -> ModelCosts:
    """Costs of the step of the module itself."""
    recording = importlib.import_module("lightning_hybrid.planning.costs")
    loader = DataLoader(torch.zeros(BATCH, LENGTH + 1, dtype=torch.long), batch_size=BATCH)
    lightning = importlib.import_module("lightning.pytorch")
    return recording.record_costs(lightning, GPT(adamw), {"train_dataloaders": loader}, "32-true").costs


def predict(case: Case, costs: ModelCosts | None = None) -> PredictedMemory:
    return predict_memory(costs or transformer_costs(SHAPE), case.layout, FORMATS["32-true"], load_hardware("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="parts of the titles")
    parser.add_argument("--recorded", action="store_true", help="costs of the module's recorded step")
    parser.add_argument("--terms", action="store_true", help="print the terms of each prediction")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        case = next(case for case in CASES if case.title == args.run)
        measured = train(Row(case.title, case.devices, case.options), str(Path(args.result).parent))
        Path(args.result).write_text(json.dumps(measured))
        return
    errors, costs = [], recorded_costs() if args.recorded else None
    print("| layout | rank | predicted MiB | measured MiB | error |\n|---|---|---|---|---|")
    for case in CASES:
        if args.only and not any(part in case.title for part in args.only):
            continue
        if costs is not None and "pipeline_cuts" in case.options:
            continue  # layers of a recorded step are cut by their FLOPs
        predicted = predict(case, costs)
        for rank, sizes in enumerate(run_apart(__file__, case.title)):
            terms = {name: size for name, size in predicted.ranks[rank // case.ranks_per_stage].items() if size}
            terms.pop("framework", None)
            size, peak = sum(terms.values()) / MIB, sizes["peak"] / MIB
            errors.append(size / peak - 1)
            print(f"| {case.title} | {rank} | {size:.1f} | {peak:.1f} | {errors[-1]:+.1%} |", flush=True)
            if args.terms:
                print("   predicted", {name: round(size / MIB, 1) for name, size in terms.items()})
                print("   measured ", {name: round(size / MIB, 1) for name, size in sizes.items()})
    print(f"mean error {statistics.mean(map(abs, errors)):.1%}, largest {max(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
