"""What activation checkpointing saves and costs: 12 layers that keep everything, what is dear, or inputs alone.

    python benchmarks/recompute.py

Bytes are those of all storages that the forward has made and that live when the backward begins, without weights:
what autograd has saved, each once. Seconds are CPU-seconds of whole training steps through a Trainer, optimizer
included; the variants take turns in one process.

Must be reached: selective at most 0.4 of the bytes that are kept otherwise, at no more than 1.1 x the CPU-seconds; full
at most 0.25 of the bytes.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of, loss_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hybrid.memory.recompute.layers import Recomputation
from lightning_hybrid.memory.recompute.policies import Recompute, layer_policies
from lightning_hybrid.step.objects.modules import find_layers


class Made(TorchDispatchMode):
    """The storages that were made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out


def saved_bytes(recompute: Recompute, width: int, layers: int, length: int, size: int) -> int:
    """Of one forward."""
    model = SmallGPT(width, layers, heads=width // 64, length=length)
    text, following = batch_of(size, length)
    found = find_layers(dict(model.named_children()))
    recomputation = Recomputation(found, layer_policies(recompute, found))
    with recomputation.running():  # selective layers measure their first run, and keep nothing in it
        model(text)
    with Made() as made, recomputation.running():
        loss = loss_of(model(text), following)
    for parameter in model.parameters():
        made.storages.pop(parameter.untyped_storage()._cdata, None)
    saved = sum(nbytes for reference, nbytes in made.storages.values() if not reference.expired())
    loss.backward()
    return saved


def trainer(turn: Turn, recompute: Recompute, width: int, layers: int, length: int, size: int) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    model = SmallGPT(width, layers, heads=width // 64, length=length)
    fit(turn, model, batch_of(size, length), strategy=Hybrid3DStrategy(recompute=recompute), devices=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    shape = dict(width=args.width, layers=args.layers, length=args.length, size=args.batch)
    policies: list[Recompute] = ["keep", "selective", 0.3, "full"]
    torch.set_num_threads(1)
    bytes_of = {str(policy): saved_bytes(policy, **shape) for policy in policies}
    for name, nbytes in bytes_of.items():
        print(f"  {name:10} {nbytes / 2**20:8.1f} MiB saved, x{nbytes / bytes_of['keep']:.3f}")
    variants = [Variant(str(policy), partial(trainer, recompute=policy, **shape)) for policy in policies]
    results = compare(variants, ranks=1, rounds=args.rounds, steps=1)
    print_table(str(shape), results)
    keep, selective, _, full = results
    share, share_of_full = (bytes_of[name] / bytes_of["keep"] for name in ("selective", "full"))
    verdict("bytes, selective / keep", (share, share, share), at_most=0.4)
    verdict("CPU, selective / keep", ratios(selective.cpu, keep.cpu), at_most=1.1)
    verdict("bytes, full / keep", (share_of_full, share_of_full, share_of_full), at_most=0.25)
    low, middle, high = ratios(full.cpu, keep.cpu)
    print(f"        CPU, full / keep: {middle:.3f} [{low:.3f} {high:.3f}]")


if __name__ == "__main__":
    main()
