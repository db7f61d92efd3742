"""Train the byte-level GPT of gpt.py over a slow link between replicas, and count what they send.

The module is the same; a callback decides what replicas send.

    python examples/slow_link.py                                  gradients in every step
    python examples/slow_link.py --compression powersgd           factors of rank 4 of each gradient
    python examples/slow_link.py --compression 1bit               signs; also int8, topk, bf16, fp16
    python examples/slow_link.py --every 20                       parameters once in 20 steps (local SGD)
    python examples/slow_link.py --every 20 --outer nesterov      the same with an outer optimizer (DiLoCo)
    python examples/slow_link.py --every 20 --pipeline 2          each replica has two stages: 4 processes
"""

import argparse
import statistics
import warnings

from gpt import GPT, Curve, SourceCode
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import GradientCompression, LocalSGD


class Bytes(Callback):
    """Notes the bytes that the first rank sends between replicas in each step, and how many it would send."""

    def __init__(self) -> None:
        self.sent: list[float] = []
        self.ratio = 1.0

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if "gradient_bytes" in metrics:
            self.sent.append(metrics["gradient_bytes"])
            self.ratio = metrics["gradient_compression"]
        elif "parameter_bytes" in metrics:
            self.sent = [metrics["parameter_bytes"]]  # a mean over all steps so far
            self.ratio = metrics["synchronous_bytes_ratio"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", default=None, help="powersgd, fp16, bf16, int8, topk, 1bit")
    parser.add_argument("--rank", type=int, default=4, help="of PowerSGD's factors")
    parser.add_argument("--start-step", type=int, default=0, help="the first step that is compressed")
    parser.add_argument("--every", type=int, default=None, help="steps of a round in which replicas send nothing")
    parser.add_argument("--outer", default=None, help="outer optimizer: nesterov, or none for averages")
    parser.add_argument("--warmup", type=int, default=0, help="synchronous steps before the first round")
    parser.add_argument("--data", type=int, default=2, help="replicas")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages of each replica")
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks of each replica")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--batch", type=int, default=8, help="windows per replica and step")
    parser.add_argument("--length", type=int, default=64, help="bytes per window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.13
    seed_everything(args.seed, verbose=False)
    curve, counted = Curve(), Bytes()
    callbacks: list[Callback] = [curve]
    if args.compression is not None:
        callbacks.append(GradientCompression(args.compression, rank=args.rank, start_step=args.start_step))
    if args.every is not None:
        callbacks.append(LocalSGD(args.every, args.outer, args.warmup))
    trainer = Trainer(
        accelerator="cpu",
        devices=args.data * args.pipeline * args.tensor,
        strategy=Hybrid3DStrategy(
            data_parallel_size=args.data, pipeline_parallel_size=args.pipeline, tensor_parallel_size=args.tensor
        ),
        max_steps=args.steps,
        gradient_clip_val=1.0,
        val_check_interval=args.steps,
        check_val_every_n_epoch=None,
        limit_val_batches=32,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        callbacks=[*callbacks, counted],
    )
    module = GPT(width=args.width, layers=args.layers, length=args.length, learning_rate=args.learning_rate)
    trainer.fit(module, SourceCode(batch_size=args.batch, length=args.length))

    if trainer.is_global_zero:
        num_bytes = 4 * sum(parameter.numel() for parameter in module.parameters())
        synchronous = 2 * num_bytes * (args.data - 1) / args.data
        sent = statistics.mean(counted.sent) if counted.sent else synchronous
        print(f"bytes per step  {sent:,.0f} of the first rank, between replicas")
        print(f"ratio           {counted.ratio:.1f} times fewer than gradients as they are")
        print(f"training loss   {curve.losses[0]:.4f} -> {statistics.mean(curve.losses[-20:]):.4f}")
        print(f"validation loss {curve.validated[-1][1]:.4f} bits per byte")


if __name__ == "__main__":
    main()
