"""Two tensor ranks: hybrid3d against one process, hand-written collectives, fairscale's layers and a DTensor plan.

    python benchmarks/tensor_parallel.py

One training step of a GPT with 4 blocks of width 512, after warm-up, one computing thread per rank:

    one process   a plain torch loop
    hybrid3d      the unmodified LightningModule, `tensor_parallel_size=2`, through a real Trainer
    by hand       the same blocks written for two ranks: local linears, one all-reduce forward and one backward per pair
    fairscale     its ColumnParallelLinear and RowParallelLinear in those blocks
    DTensor       a plan of torch's parallel styles in `configure_model`, through Lightning's ModelParallelStrategy
    sequence      hybrid3d with `sequence_parallel=True`
    context       hybrid3d with `context_parallel_size=2`, every rank with all parameters

Must be reached: CPU seconds of hybrid3d <= 1.25 x one process, and no more than by hand; wall not behind fairscale and
DTensor.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import SmallGPT, batch_of, train_alone
from torch import Tensor, nn
from torch.nn import functional as F

RANKS = 2


def one_process(turn: Turn, args: argparse.Namespace) -> None:
    train_alone(turn, _model(args), batch_of(args.batch, args.length), 1)


def hybrid3d(turn: Turn, args: argparse.Namespace, **layout: Any) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    strategy = Hybrid3DStrategy(**layout or {"tensor_parallel_size": RANKS}, num_microbatches=1)
    fit(turn, _model(args), batch_of(args.batch, args.length), strategy=strategy, devices=RANKS)


# --- blocks that know of their ranks ---------------------------------------------------------------------------------


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Column(nn.Linear):
    def __init__(self, width: int, out: int, group: Any) -> None:
        super().__init__(width, out // RANKS)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Enter.apply(x, self.group), self.weight, self.bias)


class Row(nn.Linear):
    def __init__(self, width: int, out: int, group: Any) -> None:
        super().__init__(width // RANKS, out)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return Leave.apply(F.linear(x, self.weight), self.group) + self.bias


class LocalAttention(nn.Module):
    """On this rank's heads; whatever makes their queries, keys and values."""

    def __init__(self, qkv: nn.Module, out: nn.Module, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = qkv, out, heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        local = width // RANKS
        q, k, v = (
            part.view(batch, length, self.heads, local // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(local, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, local))


def _replace_linears(model: SmallGPT, width: int, column: Any, row: Any) -> SmallGPT:
    for block in model.blocks:
        block.attention = LocalAttention(column(width, 3 * width), row(width, width), block.attention.heads // RANKS)
        block.mlp[0], block.mlp[2] = column(width, 4 * width), row(4 * width, width)
    return model


def by_hand(turn: Turn, args: argparse.Namespace) -> None:
    group = dist.new_group(range(RANKS))
    model = _replace_linears(_model(args), args.width, partial(Column, group=group), partial(Row, group=group))
    train_alone(turn, model, batch_of(args.batch, args.length), 1)


def fairscale(turn: Turn, args: argparse.Namespace) -> None:
    from fairscale.nn.model_parallel import initialize_model_parallel
    from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear

    initialize_model_parallel(RANKS)
    column = partial(ColumnParallelLinear, gather_output=False)
    row = partial(RowParallelLinear, input_is_parallel=True)
    train_alone(turn, _replace_linears(_model(args), args.width, column, row), batch_of(args.batch, args.length), 1)


class PlannedGPT(SmallGPT):
    """What Lightning's ModelParallelStrategy asks of its users."""

    def configure_model(self) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = self.device_mesh["tensor_parallel"]
        for block in self.blocks:
            if isinstance(block.attention, LocalAttention):
                continue
            attention = block.attention
            block.attention = LocalAttention(attention.qkv, attention.out, attention.heads // RANKS)
            plan = {
                "attention.qkv": ColwiseParallel(),
                "attention.out": RowwiseParallel(),
                "mlp.0": ColwiseParallel(),
                "mlp.2": RowwiseParallel(),
            }
            parallelize_module(block, mesh, plan)


def dtensor(turn: Turn, args: argparse.Namespace) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        data_parallel_size=1,
        tensor_parallel_size=RANKS,
        save_distributed_checkpoint=False,
        process_group_backend="gloo",
    )
    model = PlannedGPT(args.width, args.layers, length=args.length)
    fit(turn, model, batch_of(args.batch, args.length), strategy=strategy, devices=RANKS)


def _model(args: argparse.Namespace) -> SmallGPT:
    return SmallGPT(args.width, args.layers, length=args.length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="samples per step")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    args = parser.parse_args()
    variants = [
        Variant("one process", partial(one_process, args=args), ranks=1),
        Variant("hybrid3d", partial(hybrid3d, args=args)),
        Variant("by hand", partial(by_hand, args=args)),
        Variant("fairscale", partial(fairscale, args=args)),
        Variant("DTensor", partial(dtensor, args=args)),
        Variant("sequence", partial(hybrid3d, args=args, tensor_parallel_size=RANKS, sequence_parallel=True)),
        Variant("context", partial(hybrid3d, args=args, context_parallel_size=RANKS)),
    ]
    results = compare(variants, ranks=RANKS, rounds=args.rounds, steps=args.steps)
    print_table(f"GPT of {args.layers} blocks of width {args.width}, {RANKS} tensor ranks", results)
    alone, ours, hand, fair, planned, *_ = results
    verdict("CPU, hybrid3d / one process", ratios(ours.cpu, alone.cpu), at_most=1.25)
    verdict("CPU, hybrid3d / by hand", ratios(ours.cpu, hand.cpu), at_most=1.0)
    verdict("wall, hybrid3d / fairscale", ratios(ours.wall, fair.wall), at_most=1.0)
    verdict("wall, hybrid3d / DTensor", ratios(ours.wall, planned.wall), at_most=1.0)


if __name__ == "__main__":
    main()
