"""A step that cannot be cut, over two pipeline ranks, against ZeRO-3 over two replicas; over gloo, through the Trainer.

    python benchmarks/sharded.py

Both train a GPT on the same batch: the replicas get half of it each. The step over pipeline ranks branches on the
value of its loss, so its ranks become shards; beside it runs the same module without the branch, in two stages.

Must be reached: wall seconds of the shards <= 1.3 x ZeRO-3; parameters, gradients and optimizer states that a rank
holds between steps <= 0.6 of those of one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial

import torch
from side_by_side import Result, Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of
from torch import Tensor

RANKS = 2


class Branching(SmallGPT):
    """Its step decides by the value of the loss."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss > 100:  # never so, which is known only once the loss is there
            loss = loss.clamp(max=100)
        return loss


def hybrid3d(turn: Turn, args: argparse.Namespace, branches: bool, **sizes: int) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    model = (Branching if branches else SmallGPT)(args.width, args.layers, length=args.length)
    strategy = Hybrid3DStrategy(process_group_backend="gloo", **sizes)
    turn.note = lambda: held_bytes(model)
    replicas = sizes.get("data_parallel_size", 1)
    fit(turn, model, batch_of(args.batch // replicas, args.length), strategy=strategy, devices=RANKS)


def held_bytes(model: SmallGPT) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states that this rank holds now."""
    parameters = list(model.parameters())
    states = [value for state in model.optimizers().optimizer.state.values() for value in state.values()]
    held = {"parameters": parameters, "gradients": [p.grad for p in parameters], "states": states}
    return {name: storage_bytes(tensors) for name, tensors in held.items()}


def storage_bytes(tensors: Iterable[object]) -> int:
    """Bytes of the storages of tensors, each counted once."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type != "meta":
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())


def print_bytes(result: Result, name: str, whole: int) -> None:
    largest = max(note[name] for round_ in result.notes for note in round_)
    verdict(f"{name} per rank / one process", (largest / whole,) * 3, at_most=0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="samples per step, over all ranks")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="per turn")
    args = parser.parse_args()
    torch.set_num_threads(1)
    variants = [
        Variant("ZeRO-3", partial(hybrid3d, args=args, branches=True, data_parallel_size=2, zero_stage=3)),
        Variant("shards", partial(hybrid3d, args=args, branches=True, pipeline_parallel_size=2)),
        Variant("two stages", partial(hybrid3d, args=args, branches=False, pipeline_parallel_size=2)),
    ]
    results = compare(variants, ranks=RANKS, rounds=args.rounds, steps=args.steps, warm_up=2)
    print_table(f"GPT of {args.layers} blocks of width {args.width}, 2 ranks", results)
    zero, shards, _ = results
    verdict("wall, shards / ZeRO-3", ratios(shards.wall, zero.wall), at_most=1.3)
    verdict("CPU, shards / ZeRO-3", ratios(shards.cpu, zero.cpu), at_most=1.3)
    of_model = storage_bytes(SmallGPT(args.width, args.layers, length=args.length).parameters())
    for name, times in (("parameters", 1), ("gradients", 1), ("states", 2)):
        print_bytes(shards, name, times * of_model)


if __name__ == "__main__":
    main()
