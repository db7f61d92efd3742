"""Two replicas that share the experts of a mixture against two that hold all of them, and two tensor ranks.

    python benchmarks/experts.py

One training step of a small Mixtral from transformers on two ranks, through the Trainer and over gloo, one computing
thread each, from batch to batch after warm-up. All variants train the same model on as many tokens: a tensor rank sees
those of both replicas, and its batch is twice as large. Bytes are those of experts on one rank: parameters, gradients
and the states of AdamW, after a step.

Must be reached: half the bytes, and CPU-seconds of expert_parallel_size=2 <= 1.05 x expert_parallel_size=1. Shared
experts send rows where whole ones send gradients, so what is cheaper depends on the tokens of a step: rows cost
4 x tokens x top_k x width numbers per layer, gradients 2 x parameters of the experts.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from side_by_side import Result, Turn, Variant, compare, fit, print_table, ratios, verdict
from small_gpt import VOCABULARY, batch_of, loss_of, optimizer_of
from torch import Tensor

RANKS = 2


class Mixture(LightningModule):
    """A mixture as its user writes it."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM

        torch.manual_seed(1)
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.width,
            intermediate_size=args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=args.experts,
            num_experts_per_tok=2,
            max_position_embeddings=args.length,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = MixtralForCausalLM(config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        text, following = batch
        return loss_of(self.model(text, use_cache=False).logits, following)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.parameters())


class NotesBytes(Callback):
    """Lets a variant say how many bytes of experts its rank holds."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._turn.note = partial(self._bytes, trainer, pl_module)

    def _bytes(self, trainer: Any, module: Any) -> int:
        held = 0
        for name, parameter in module.named_parameters():
            if ".experts." not in name:
                continue
            states = trainer.optimizers[0].state.get(parameter, {}).values()
            tensors = [parameter, parameter.grad, *states]
            with torch._C.DisableTorchFunction():
                held += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor) and tensor.dim())
        return held


def hybrid3d(turn: Turn, args: argparse.Namespace, batches: int, sizes: dict[str, int]) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    strategy = Hybrid3DStrategy(process_group_backend="gloo", **sizes)
    batch = batch_of(batches * args.batch, args.length)
    fit(turn, Mixture(args), batch, strategy=strategy, devices=RANKS, callbacks=[NotesBytes(turn)])


def most_bytes(result: Result) -> int:
    """Of experts on one rank, at the ends of turns."""
    return max(noted for notes in result.notes for noted in notes if noted is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512, help="between the products of an expert")
    parser.add_argument("--experts", type=int, default=8, help="of each layer, of which a token uses 2")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="samples per step and replica")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="per turn")
    args = parser.parse_args()
    layouts: dict[str, tuple[int, dict[str, int]]] = {
        "whole on two replicas": (1, {"data_parallel_size": 2}),
        "shared": (1, {"data_parallel_size": 2, "expert_parallel_size": 2}),
        "shared, in 2 chunks": (1, {"data_parallel_size": 2, "expert_parallel_size": 2, "expert_chunks": 2}),
        "cut over 2 tensor ranks": (2, {"tensor_parallel_size": 2}),
    }
    variants = [
        Variant(name, partial(hybrid3d, args=args, batches=batches, sizes=sizes))
        for name, (batches, sizes) in layouts.items()
    ]
    results = compare(variants, ranks=RANKS, rounds=args.rounds, steps=args.steps)
    print_table(f"Mixtral of {args.layers} layers with {args.experts} experts, {RANKS} ranks", results)
    whole, *others = results
    print("  MiB of experts on a rank:", {result.name: round(most_bytes(result) / 2**20, 1) for result in results})
    for result in others:
        share = most_bytes(result) / most_bytes(whole)
        verdict(f"bytes, {result.name} / whole", (share, share, share), at_most=0.5)
    shared = others[0]
    verdict("CPU, shared / whole", ratios(shared.cpu, whole.cpu), at_most=1.05)


if __name__ == "__main__":
    main()
