"""Train a byte-level GPT on windows of 4,096 bytes whose positions are sharded over context ranks.

The model is that of `gpt.py`; its windows are 32 times as long. What autograd saves for the backward grows with the
length, and is shared by the ranks: the program prints the bytes that the forward of a step saved on the first rank, and
those that one process saves for such a window.

    python examples/long_context.py                              2 context ranks: 2 processes
    python examples/long_context.py --recompute full             each layer saves its input alone
    python examples/long_context.py --context 4                  4 processes
    python examples/long_context.py --context 1                  one process
"""

import argparse
import contextlib
import math
import time
import warnings
from collections.abc import Iterator

import torch
from gpt import GPT, SourceCode
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_hybrid import Hybrid3DStrategy


@contextlib.contextmanager
def counting_saved_bytes(sizes: dict[int, int]) -> Iterator[None]:
    """Note the bytes of each storage that autograd saves inside; `sizes` is by address."""

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield


class SavedActivations(Callback):
    """Counts what the forward of the first step saves for its backward, on each rank."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.counting = contextlib.ExitStack()

    def on_train_batch_start(self, trainer: Trainer, module: GPT, batch: object, batch_idx: int) -> None:
        if trainer.global_step == 0:
            self.counting.enter_context(counting_saved_bytes(self.sizes))

    def on_before_backward(self, *_: object) -> None:
        self.counting.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2, help="ranks that share the positions of each window")
    parser.add_argument("--recompute", choices=["full", "selective"], help="activation checkpointing")
    parser.add_argument("--accelerator", default="cpu", help="as in Lightning's Trainer")
    parser.add_argument("--length", type=int, default=4096, help="bytes per window")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    args = parse()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.13
    seed_everything(1, verbose=False)
    saved = SavedActivations()
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.context,
        strategy=Hybrid3DStrategy(context_parallel_size=args.context, recompute=args.recompute),
        max_steps=args.steps,
        gradient_clip_val=1.0,
        limit_val_batches=2,
        val_check_interval=args.steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=5,
        enable_model_summary=False,
        callbacks=saved,  # Lightning's logger and its checkpoint after validation are on
    )
    module = GPT(width=args.width, layers=args.layers, length=args.length, warmup_steps=5)
    data = SourceCode(batch_size=1, length=args.length, max_bytes=max(1_000_000, 40 * args.length))
    begin = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - begin

    if trainer.is_global_zero:  # the module is full again, on every rank
        sizes: dict[int, int] = {}
        with counting_saved_bytes(sizes):
            loss = module.loss(next(iter(data.train_dataloader())))
        del loss
        per_rank, one_process = sum(saved.sizes.values()) / 2**20, sum(sizes.values()) / 2**20
        bits = float(trainer.callback_metrics["val_bits_per_byte"])
        print(f"\npositions          {args.length:,} per window, over {args.context} context ranks")
        print(f"saved activations  {per_rank:.1f} MiB on the first rank, {one_process:.1f} MiB in one process")
        print(f"validation loss    {bits:.3f} bits per byte after {args.steps} steps (uniform: {math.log2(256):.0f})")
        print(f"training           {seconds:.0f} s; {trainer.checkpoint_callback.best_model_path}")


if __name__ == "__main__":
    main()
