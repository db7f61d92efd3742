"""Train a byte-level GPT dense, turn its MLPs into experts over ranks, and go on; compare with going on dense.

The model and its data are those of `gpt.py`, and neither knows of experts: the callback `MoEUpcycle` makes them, and
`expert_parallel_size` shards them over the replicas, which exchange the rows of their tokens. With one expert per token
(the default) each byte passes through as many weights as before, but for the router's. The load of the experts is
logged, and drawn at the end.

    python examples/moe.py                                          2 expert ranks, each with half of the experts
    python examples/moe.py --devices 4 --pipeline 2                 2 stages of 2 expert ranks
    python examples/moe.py --devices 2 --pipeline 2                 2 stages, all experts of a layer on one rank
    python examples/moe.py --devices 1 --dense-steps 300 --steps 900       one process; long enough for experts to pay
    python examples/moe.py --experts 16 --top-k 2 --every 2
"""

import argparse
import copy
import time
import warnings
from pathlib import Path

from gpt import GPT, SourceCode
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import ExpertLoadMonitor, MoEUpcycle


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="processes: stages x replicas")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument(
        "--expert-parallel", type=int, help="ranks that share the experts of a layer; all replicas by default"
    )
    parser.add_argument("--accelerator", default="cpu", help="as in Lightning's Trainer")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=1, help="experts that each byte passes through")
    parser.add_argument("--every", type=int, default=1, help="each n-th MLP becomes experts")
    parser.add_argument("--router-std", type=float, default=1.0, help="of the routers' first weights")
    parser.add_argument("--dense-steps", type=int, default=60, help="steps before there are experts")
    parser.add_argument("--steps", type=int, default=120, help="steps after, with experts and without")
    parser.add_argument("--batch", type=int, default=64, help="windows per step, of all replicas")
    parser.add_argument("--length", type=int, default=64, help="bytes per window")
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--val-batches", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("lightning_logs/moe"), help="folder for the picture")
    return parser.parse_args()


def train(
    module: GPT, args: argparse.Namespace, steps: int, *callbacks: Callback, experts: int = 1
) -> tuple[float, float]:
    """Train for some steps on the same batches; bits per byte in validation, and seconds of training."""
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=Hybrid3DStrategy(pipeline_parallel_size=args.pipeline, expert_parallel_size=experts),
        max_steps=steps,
        gradient_clip_val=1.0,
        limit_val_batches=args.val_batches,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=steps,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    begin = time.perf_counter()
    replicas = args.devices // args.pipeline
    trainer.fit(module, SourceCode(batch_size=args.batch // replicas, length=args.length))
    return float(trainer.callback_metrics["val_bits_per_byte"]), time.perf_counter() - begin


def active(module: GPT, args: argparse.Namespace) -> int:
    """The parameters that one byte passes through."""
    total = 0
    for name, parameter in module.named_parameters():
        is_of_experts = ".moe.experts." in name
        total += parameter.numel() * args.top_k // args.experts if is_of_experts else parameter.numel()
    return total


@rank_zero_only
def show(rows: list[tuple[str, GPT, int, float, float]], args: argparse.Namespace) -> None:
    print(f"\n{'':22}{'steps':>7}{'parameters':>13}{'active':>11}{'bits per byte':>15}{'seconds':>9}")
    for name, module, steps, bits, seconds in rows:
        total = sum(parameter.numel() for parameter in module.parameters())
        print(f"{name:22}{steps:7}{total:13,}{active(module, args):11,}{bits:15.4f}{seconds:9.0f}")
    dense, sparse = rows[1][3], rows[2][3]
    print(
        f"\n{args.experts} experts: {sparse:.4f} bits per byte, dense {dense:.4f} ({sparse / dense - 1:+.1%}); "
        f"loads in {args.out / 'expert_load.png'}"
    )


def main() -> None:
    args = parse()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.13
    seed_everything(1, verbose=False)
    dense = GPT(width=args.width, layers=args.layers, length=args.length, learning_rate=args.learning_rate)
    rows = [("dense, to begin with", dense, args.dense_steps, *train(dense, args, args.dense_steps))]
    sparse = copy.deepcopy(dense)
    rows.append(("dense, continued", dense, args.steps, *train(dense, args, args.steps)))
    upcycle = MoEUpcycle(
        "blocks.*.mlp", num_experts=args.experts, top_k=args.top_k, every=args.every, router_std=args.router_std
    )
    monitor = ExpertLoadMonitor(args.out / "expert_load.png", every_n_steps=max(1, args.steps // 30))
    trained = train(
        sparse, args, args.steps, upcycle, monitor, experts=args.expert_parallel or args.devices // args.pipeline
    )
    rows.append(("upcycled, continued", sparse, args.steps, *trained))
    show(rows, args)


if __name__ == "__main__":
    main()
