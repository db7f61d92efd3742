"""Optimizer states in a memory-mapped file against states in memory: step time, and what of them is resident.

    python benchmarks/offload.py --folder /tmp/states

One process, one computing thread, AdamW, a GPT whose states are larger than its activations.

Must be reached: a step takes at most 2 x that of states in memory; two layers' states at most are resident.
"""

from __future__ import annotations

import argparse
from functools import partial

from lightning.pytorch import Callback, LightningModule, Trainer
from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of
from torch.utils.data import DataLoader


class Resident(Callback):
    """The most bytes of the file that were in memory while the optimizer stepped."""

    def __init__(self) -> None:
        self.most = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        [offloaded] = trainer.strategy._lifecycle.optimization.offloaded  # type: ignore[attr-defined]
        file, evict = offloaded.file, offloaded.file.evict
        self.largest, self.whole = max(length for _, length in file._regions), file.nbytes

        def counted(region: int) -> None:
            self.most = max(self.most, file.resident_bytes())
            evict(region)

        file.evict = counted


def one(turn: Turn, args: argparse.Namespace, offload: str | None) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    model = SmallGPT(args.width, args.layers, length=args.length)
    strategy = Hybrid3DStrategy(offload=offload)
    fit(turn, model, batch_of(args.batch, args.length), strategy=strategy, devices=1)


def count(args: argparse.Namespace) -> Resident:
    from lightning_hybrid import Hybrid3DStrategy

    resident = Resident()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=Hybrid3DStrategy(offload=f"disk:{args.folder}"),
        callbacks=[resident],
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = DataLoader([batch_of(args.batch, args.length)] * 3, batch_size=None)
    trainer.fit(SmallGPT(args.width, args.layers, length=args.length), batches)
    return resident


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="per turn")
    parser.add_argument("--folder", default="offloaded_states")
    args = parser.parse_args()
    variants = [
        Variant("in memory", partial(one, args=args, offload=None)),
        Variant("in a file", partial(one, args=args, offload=f"disk:{args.folder}")),
    ]
    results = compare(variants, ranks=1, rounds=args.rounds, steps=args.steps)
    print_table(f"GPT of {args.layers} blocks of width {args.width}, AdamW", results)
    memory, file = results
    verdict("wall, file / memory", ratios(file.wall, memory.wall), at_most=2.0)
    verdict("CPU, file / memory", ratios(file.cpu, memory.cpu), at_most=2.0)
    seen = count(args)
    mib = 2.0**20
    print(
        f"  resident states: {seen.most / mib:.1f} MiB at most, of {seen.whole / mib:.1f} MiB;"
        f" largest layer {seen.largest / mib:.1f} MiB"
    )
    share = seen.most / seen.largest
    verdict("resident / largest layer", (share, share, share), at_most=2.0)


if __name__ == "__main__":
    main()
