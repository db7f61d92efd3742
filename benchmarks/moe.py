"""What a layer of experts costs, against other libraries' layers and against dense layers of equal arithmetic.

    python benchmarks/moe.py

Forward and backward of one layer on one thread, in one process, by turns. Gated experts (SwiGLU without biases) are
compared with transformers' implementations of such experts; plain ones (with biases and ReLU) with fairscale's
`MOELayer` and, where it is installed, DeepSpeed's, whose experts they are. Each expert's arithmetic is the same; those
two drop what goes beyond a capacity, and ours drops nothing.

"Dense" is one MLP of k times the hidden width: the floating-point operations of k experts per token. "Without routing"
are the same experts on rows that are sorted already, as many for each: the better of ours and of batched products of
matrices. It is what a layer of experts can reach at most.

transformers' "batched_mm" is not run: it gathers weights for each row, 26 GB of them at the default sizes. Nor are its
"eager" and fairscale's layer with more than 64 experts: their seconds grow with the square of the number of experts.

Must be reached, in CPU-seconds: see `check`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import Result, Turn, Variant, compare, print_table, ratios, verdict
from torch import Tensor, nn


def train(turn: Turn, layer: nn.Module, x: Tensor, run: Callable[[Tensor], Any] | None = None) -> None:
    """Forward and backward, for ever. A layer gives its result, or its result and a loss."""
    x.requires_grad_()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    while True:
        turn.border()
        layer.zero_grad(set_to_none=True)
        x.grad = None
        out = layer(x) if run is None else run(x)
        y, *losses = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward([y, *losses], [grad.view(y.shape), *(None for _ in losses)])


def tokens_of(args: argparse.Namespace, times: int = 1) -> Tensor:
    return torch.randn(times * args.tokens, args.dim, generator=torch.Generator().manual_seed(3))


def ours(turn: Turn, args: argparse.Namespace, experts: int, gated: bool) -> None:
    from lightning_hybrid.experts import MoE

    torch.manual_seed(1)
    kind: dict[str, Any] = {"gated": True} if gated else {"gated": False, "activation": "relu", "bias": True}
    layer = MoE(args.dim, args.hidden, num_experts=experts, top_k=args.top_k, **kind)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y, report = layer(x)
        return y, report.loss

    train(turn, layer, tokens_of(args), run)


def ours_sorted(turn: Turn, args: argparse.Namespace, experts: int, gated: bool) -> None:
    from lightning_hybrid.experts import GroupedExperts

    kind: dict[str, Any] = {"gated": True} if gated else {"gated": False, "activation": "relu", "bias": True}
    layer = GroupedExperts(experts, args.dim, args.hidden, **kind)
    counts = torch.full((experts,), args.tokens * args.top_k // experts)
    train(turn, layer, tokens_of(args, args.top_k), partial(layer, counts=counts))


class Batched(nn.Module):
    """Experts as batched products of matrices."""

    def __init__(self, args: argparse.Namespace, experts: int, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.up = nn.Parameter(torch.randn(experts, args.dim, (2 if gated else 1) * args.hidden) * 0.05)
        self.down = nn.Parameter(torch.randn(experts, args.hidden, args.dim) * 0.05)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.bmm(rows.view(self.up.shape[0], -1, rows.shape[1]), self.up)
        return torch.bmm(_between(hidden, self.gated), self.down).view(rows.shape)


def _between(hidden: Tensor, gated: bool) -> Tensor:
    if not gated:
        return hidden.relu()
    first, second = hidden.chunk(2, -1)
    return F.silu(first) * second


def batched(turn: Turn, args: argparse.Namespace, experts: int, gated: bool) -> None:
    train(turn, Batched(args, experts, gated), tokens_of(args, args.top_k))


class Dense(nn.Module):
    """One MLP."""

    def __init__(self, dim: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.up = nn.Linear(dim, (2 if gated else 1) * hidden, bias=not gated)
        self.down = nn.Linear(hidden, dim, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(_between(self.up(x), self.gated))
        return y


def dense(turn: Turn, args: argparse.Namespace, gated: bool) -> None:
    train(turn, Dense(args.dim, args.top_k * args.hidden, gated), tokens_of(args))


def transformers(turn: Turn, args: argparse.Namespace, experts: int, implementation: str) -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(1)
    config = MixtralConfig(
        hidden_size=args.dim,
        intermediate_size=args.hidden,
        num_local_experts=experts,
        num_experts_per_tok=args.top_k,
        hidden_act="silu",
    )
    config._experts_implementation = implementation
    layer = MixtralSparseMoeBlock(config)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -0.06, 0.06)
    train(turn, layer, tokens_of(args).unsqueeze(0))


def fairscale(turn: Turn, args: argparse.Namespace, experts: int) -> None:
    from fairscale.nn.moe import MOELayer, Top2Gate

    torch.manual_seed(1)
    members = nn.ModuleList(Dense(args.dim, args.hidden, gated=False) for _ in range(experts))
    layer = MOELayer(Top2Gate(args.dim, experts), members)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), layer.l_aux

    train(turn, layer, tokens_of(args).unsqueeze(1), run)  # the first dim must be divisible by experts


def deepspeed(turn: Turn, args: argparse.Namespace, experts: int) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.comm
    from deepspeed.moe.layer import MoE

    torch.manual_seed(1)
    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    expert = Dense(args.dim, args.hidden, gated=False)
    layer = MoE(args.dim, expert, num_experts=experts, ep_size=1, k=args.top_k)
    layer.set_deepspeed_parallelism()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y, loss, _ = layer(x)
        return y, loss

    train(turn, layer, tokens_of(args).unsqueeze(0), run)


def check(experts: int, gated: Sequence[Result], plain: Sequence[Result]) -> None:
    found = {result.name: result.cpu for result in (*gated, *plain)}
    of = partial(_ratio, found)
    if experts in (8, 32):
        for kind in ("gated", "plain"):
            verdict(f"speed of the dense MLP, {kind}", of(f"dense, {kind}", f"ours, {kind}"), at_least=0.8)
        if "fairscale" in found:
            verdict("faster than fairscale", of("fairscale", "ours, plain"), at_least=5.0 if experts == 8 else 15.0)
    for kind in ("gated", "plain") if experts == 128 else ():
        ways = [f"ours without routing, {kind}", f"batched without routing, {kind}"]
        best = min(ways, key=lambda way: ratios(found[way], found[f"ours, {kind}"])[1])
        verdict(f"speed of '{best}'", of(best, f"ours, {kind}"), at_least=0.9)
    peers = {"transformers, eager": "gated", "transformers, grouped_mm": "gated", "deepspeed": "plain"}
    for peer, kind in peers.items():
        if peer in found:
            verdict(f"seconds of '{peer}'", of(f"ours, {kind}", peer), at_most=0.95)


def _ratio(found: dict[str, list[float]], over: str, under: str) -> tuple[float, float, float]:
    return ratios(found[over], found[under])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1, help="per turn")
    parser.add_argument("--only", choices=["gated", "plain"])
    args = parser.parse_args()
    for experts in args.experts:
        results = []
        for kind in ("gated", "plain"):
            is_gated = kind == "gated"
            sizes = {"args": args, "experts": experts}
            variants = [
                Variant(f"dense, {kind}", partial(dense, args=args, gated=is_gated)),
                Variant(f"ours, {kind}", partial(ours, **sizes, gated=is_gated)),
                Variant(f"ours without routing, {kind}", partial(ours_sorted, **sizes, gated=is_gated)),
                Variant(f"batched without routing, {kind}", partial(batched, **sizes, gated=is_gated)),
            ]
            if is_gated:
                for way in ("eager", "grouped_mm") if experts <= 64 else ("grouped_mm",):
                    variants.append(Variant(f"transformers, {way}", partial(transformers, **sizes, implementation=way)))
            else:
                if experts <= 64:
                    variants.append(Variant("fairscale", partial(fairscale, **sizes)))
                if importlib.util.find_spec("deepspeed") is not None:
                    variants.append(Variant("deepspeed", partial(deepspeed, **sizes)))
            if args.only in (None, kind):
                results.append(compare(variants, ranks=1, rounds=args.rounds, steps=args.steps))
                print_table(f"{experts} experts, {kind}", results[-1])
            else:
                results.append([])
        if args.only is None:
            check(experts, *results)


if __name__ == "__main__":
    main()
