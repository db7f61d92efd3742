"""Sparse upcycling: replaces dense MLPs of an unmodified LightningModule by experts initialized as copies of them.

Komatsuzaki et al. 2022, "Sparse upcycling" (arXiv 2212.05055). The modules are replaced before Lightning restores
weights, builds optimizers, or passes the module to its strategy, so that all of these see only the experts.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_hybrid.experts.moe.upcycling import AuxiliaryLoss, UpcycledMLP, upcycle_mlp
from lightning_hybrid.patching import around_method
from lightning_hybrid.step.tracing.asides import taking_asides
from lightning_hybrid.step.tracing.recording import find_loss
from lightning_hybrid.text import meant_of


class MoEUpcycle(Callback):
    """Replaces dense MLPs by experts initialized as copies of them, and adds their balance loss to the step's loss.

    The first output is the dense module's: each router's weights sum to 1, and the experts are equal until trained.
    In `fit`, each layer's auxiliary losses are added to what `training_step` returns (a tensor, or a mapping with
    "loss") and logged as "balance_loss". The module stays upcycled afterwards; the same callback then changes nothing.

    Args:
        pattern: Pattern, or several, of MLP names; `*` matches one component of a name: "model.layers.*.mlp".
        num_experts: Copies of each MLP.
        top_k: Experts per position.
        every: Of the matching MLPs, each n-th is replaced: with 2 the second, the fourth, and so on.
        capacity_factor: Capacity factor of `MoE`; None drops nothing.
        balance_loss: Weight of the loss that balances the experts' loads.
        z_loss: Weight of the loss that keeps the router's logits small.
        jitter: Noise on the router's input in training, as in `MoE`.
        noise: Standard deviation of noise on the weights of each copy, relative to that of the weights; not needed for
            the experts to diverge, and with it the first output is not the dense one.
        router_std: Standard deviation of the routers' initial weights.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        pattern: str | Sequence[str],
        *,
        num_experts: int = 8,
        top_k: int = 2,
        every: int = 1,
        capacity_factor: float | None = None,
        balance_loss: float = 0.01,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        noise: float = 0.0,
        router_std: float = 0.02,
    ) -> None:
        integers = {"num_experts": num_experts, "top_k": top_k, "every": every}
        for name, number in integers.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r} must be a whole number, at least 1")
        if top_k > num_experts:
            raise ValueError(f"top_k={top_k} is more than num_experts={num_experts}; set top_k={num_experts} or less")
        weights = {"balance_loss": balance_loss, "z_loss": z_loss, "jitter": jitter, "noise": noise}
        for name, value in {**weights, "router_std": router_std}.items():
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative")
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(f"capacity_factor={capacity_factor} must be positive; leave it out to drop nothing")
        self.patterns = [pattern] if isinstance(pattern, str) else list(pattern)
        self.every = every
        self.options: dict[str, Any] = {
            "num_experts": num_experts,
            "top_k": top_k,
            "capacity_factor": capacity_factor,
            **weights,
            "router_std": router_std,
        }
        self.layers: list[str] = []
        self._undo = contextlib.ExitStack()

    @property
    def _adds_loss(self) -> bool:
        return bool(self.options["balance_loss"] or self.options["z_loss"])

    # -- the module ---------------------------------------------------------------------------------------------------

    def upcycle(self, module: nn.Module) -> list[str]:
        """Replaces the MLPs of a module; returns the names of all modules that are upcycled now.

        Call it yourself to load weights with experts into a module outside of a Trainer.

        Raises:
            ValueError: A pattern matches nothing, or a module that cannot be an expert.
        """
        names = self._matching(module)
        chosen = names[self.every - 1 :: self.every]
        if not chosen:
            raise ValueError(
                f"MoEUpcycle(every={self.every}) takes none of the {len(names)} modules that match"
                f" {', '.join(map(repr, self.patterns))}; set every={len(names)} or less"
            )
        made: dict[int, UpcycledMLP] = {}
        for name in chosen:
            dense = module.get_submodule(name)
            if isinstance(dense, UpcycledMLP):
                self._check_same(name, dense)
                continue
            if id(dense) not in made:
                self._check_untied(module, name, dense)
                made[id(dense)] = upcycle_mlp(name, dense, **self.options)
        if made:
            before = _count(module)
            for name, other in list(module.named_modules(remove_duplicate=False)):
                if id(other) in made:  # a module with several names remains one module
                    parent, _, attribute = name.rpartition(".")
                    setattr(module.get_submodule(parent), attribute, made[id(other)])
            self._report(module, chosen, before)
        self.layers = chosen
        return chosen

    def _matching(self, module: nn.Module) -> list[str]:
        every = [name for name, _ in module.named_modules() if name]
        # The submodules of upcycled layers are not the user's.
        done = tuple(f"{name}." for name, inner in module.named_modules() if isinstance(inner, UpcycledMLP))
        every = [name for name in every if not name.startswith(done)]
        found: dict[str, None] = {}
        for pattern in self.patterns:
            matched = [name for name in every if _matches(name, pattern)]
            if not matched:
                is_late = isinstance(module, LightningModule) and is_overridden("setup", module)
                raise ValueError(
                    f"MoEUpcycle: {pattern!r} matches no module of {type(module).__name__}; * stands for one part of a"
                    f" name{meant_of(pattern, every)}"
                    + "; modules made in LightningModule.setup come too late: make them in configure_model"
                    * is_late
                )
            found.update(dict.fromkeys(matched))
        order = {name: index for index, name in enumerate(every)}
        return sorted(found, key=order.__getitem__)

    def _check_same(self, name: str, layer: UpcycledMLP) -> None:
        has = layer.num_experts
        if has != self.options["num_experts"]:
            raise ValueError(
                f"MoEUpcycle(num_experts={self.options['num_experts']}): {name} is upcycled already, to {has} experts;"
                f" set num_experts={has}, or start from the dense module"
            )

    def _check_untied(self, module: nn.Module, name: str, dense: nn.Module) -> None:
        fqns = {id(parameter): fqn for fqn, parameter in dense.named_parameters()}
        inside = {id(inner) for inner in dense.modules()}
        for other, outer in module.named_modules():
            tied = next((fqns[id(p)] for p in outer.parameters(recurse=False) if id(p) in fqns), None)
            if id(outer) not in inside and tied is not None:
                raise ValueError(
                    f"MoEUpcycle: {name}.{tied} is tied to a parameter of {other or 'the root'}, and the copies of it"
                    " in experts would not be; untie it, or leave this MLP out"
                )

    def _report(self, module: nn.Module, chosen: list[str], before: int) -> None:
        listed = [name for name in chosen if not module.get_submodule(name).is_grouped]
        lines = [
            f"MoEUpcycle: {len(chosen)} MLPs have {self.options['num_experts']} experts each now,"
            f" {self.options['top_k']} for each position: {', '.join(chosen)}",
            f"parameters: {before:,} before, {_count(module):,} with experts",
        ]
        if listed:
            lines.append(
                f"called one expert after the other, since they are no two linears, gated or not, around a known"
                f" activation: {', '.join(listed)}"
            )
        rank_zero_info("\n".join(lines))

    # -- Lightning's hooks --------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Upcycles the module in any stage, so that weights with experts can be loaded; in fit, wraps the step.

        Raises:
            ValueError: As `upcycle`; or with manual optimization, which would miss the balance loss.
        """
        try:
            self.upcycle(pl_module)
        except ValueError:
            if not is_overridden("configure_model", pl_module):
                raise
            call._call_configure_model(trainer)  # its contract allows that it is called again
            self.upcycle(pl_module)
        if stage != "fit" or not self._adds_loss:
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "MoEUpcycle adds the balance loss to what training_step returns, which manual optimization does not"
                " use; set balance_loss=0 and z_loss=0, or use automatic optimization"
            )
        self._undo.close()
        self._undo.callback(around_method(pl_module, "training_step", _add_losses, reason="adds balance losses"))

    def teardown(self, *_: Any, **__: Any) -> None:
        """Unwraps the module's `training_step`."""
        self._undo.close()

    on_exception = teardown

    def state_dict(self) -> dict[str, Any]:
        """Returns the names of the upcycled layers, so that Lightning warns if resumed without this callback."""
        return {"layers": list(self.layers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Checks that the checkpoint has the same upcycled layers.

        Raises:
            ValueError: The layers differ.
        """
        if state_dict["layers"] != self.layers:
            raise ValueError(
                f"MoEUpcycle: the checkpoint has experts at {', '.join(state_dict['layers'])}, and the module at"
                f" {', '.join(self.layers)}; use the pattern and every= of the run that saved it"
            )


def _matches(name: str, pattern: str) -> bool:
    components, patterns = name.split("."), pattern.split(".")
    return len(components) == len(patterns) and all(map(fnmatch.fnmatchcase, components, patterns))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# -- the step ---------------------------------------------------------------------------------------------------------


def _add_losses(module: LightningModule, run: Callable[[], Any]) -> Any:
    """Runs a training step, and adds the auxiliary losses of its layers to the loss."""
    with taking_asides(AuxiliaryLoss) as side_outputs:
        output = run()
    return _with_losses(module, output, [loss.value for loss in side_outputs])


def _with_losses(module: LightningModule, output: Any, losses: list[Tensor]) -> Any:
    loss = find_loss(output)
    if not losses or not isinstance(loss, Tensor):
        return output
    # One after the other: in a pipeline the partial sum is sent along with the activations.
    total = functools.reduce(torch.add, losses)
    if torch.is_grad_enabled() and loss.requires_grad and not total.requires_grad and _learns(module):
        raise ValueError(
            "the balance loss has no gradient: the layers ran without one, as under reentrant activation checkpointing;"
            " use torch.utils.checkpoint(..., use_reentrant=False), or recompute='full' of the strategy"
        )
    module.log("balance_loss", total.detach(), on_step=True, on_epoch=False)
    total = loss + total
    return {**output, "loss": total} if isinstance(output, Mapping) else total


def _learns(module: nn.Module) -> bool:
    routers = [inner.moe.router for inner in module.modules() if isinstance(inner, UpcycledMLP)]
    return any(parameter.requires_grad for router in routers for parameter in router.parameters())
