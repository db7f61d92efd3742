"""Sparse upcycling: turn dense MLPs of an unmodified LightningModule into mixtures of experts that begin as copies.

See Komatsuzaki et al. 2022, "Sparse upcycling" (arXiv 2212.05055). The modules are replaced before Lightning restores
weights, builds optimizers, or hands the module to its strategy, so that all of these see the experts and nothing else.
"""

from __future__ import annotations

import difflib
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

from lightning_hybrid.callbacks.wrapped_methods import wrap_method
from lightning_hybrid.experts.moe.upcycling import AuxiliaryLoss, UpcycledMLP, upcycled
from lightning_hybrid.step.tracing.side_outputs import taking_asides


class MoEUpcycle(Callback):
    """Replaces dense MLPs by experts that begin as copies of them, and adds their balance loss to the step's.

    The first output is the dense module's: each router's weights sum to 1, and the experts are alike until they learn.
    In `fit`, each layer's auxiliary losses are added to what `training_step` returns (a tensor, or a mapping with
    "loss") and logged as "balance_loss". The module stays upcycled afterwards; the same callback then changes nothing.

    Args:
        pattern: Names of the MLPs, or several; `*` stands for one part of a name: "model.layers.*.mlp".
        num_experts: Copies of each MLP.
        top_k: Experts that each position goes to.
        every: Of the matching MLPs, each n-th is replaced: with 2 the second, the fourth, and so on.
        capacity_factor: Of each expert, see `MoE`; None drops nothing.
        balance_loss: Weight of the loss that evens out the experts' loads.
        z_loss: Weight of the loss that keeps the router's logits small.
        jitter: Noise on the router's input in training, see `MoE`.
        noise: Standard deviation of what is added to the weights of each copy, in parts of the weights' own; not
            needed for the experts to part, and with it the first output is not the dense one.
        router_std: Standard deviation of the routers' first weights.

    Raises:
        ValueError: A number out of its range.
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
        whole = {"num_experts": num_experts, "top_k": top_k, "every": every}
        for name, number in whole.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r} must be a whole number, at least 1")
        if top_k > num_experts:
            raise ValueError(f"top_k={top_k} is more than num_experts={num_experts}; set top_k={num_experts} or less")
        parts = {"balance_loss": balance_loss, "z_loss": z_loss, "jitter": jitter, "noise": noise}
        for name, part in {**parts, "router_std": router_std}.items():
            if part < 0:
                raise ValueError(f"{name}={part} must not be negative")
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(f"capacity_factor={capacity_factor} must be positive; leave it out to drop nothing")
        self.patterns = [pattern] if isinstance(pattern, str) else list(pattern)
        self.every = every
        self.options: dict[str, Any] = {
            "num_experts": num_experts,
            "top_k": top_k,
            "capacity_factor": capacity_factor,
            **parts,
            "router_std": router_std,
        }
        self.layers: list[str] = []
        self._leave: Callable[[], None] = _nothing

    @property
    def _adds_loss(self) -> bool:
        return bool(self.options["balance_loss"] or self.options["z_loss"])

    # -- the module ---------------------------------------------------------------------------------------------------

    def upcycle(self, module: nn.Module) -> list[str]:
        """Replace the MLPs of a module; those that were replaced before stay.

        Call it yourself to load weights with experts into a module outside of a Trainer.

        Args:
            module: The user's module, with the weights that the experts are to begin with.

        Returns:
            The names of all that are experts now.

        Raises:
            ValueError: A pattern matches nothing, or something that cannot be an expert.
        """
        names = self._matching(module)
        chosen = names[self.every - 1 :: self.every]
        if not chosen:
            raise ValueError(
                f"MoEUpcycle(every={self.every}) takes none of the {len(names)} modules that match"
                f" {_quoted(self.patterns)}; set every={len(names)} or less"
            )
        made: dict[int, UpcycledMLP] = {}
        for name in chosen:
            dense = module.get_submodule(name)
            if isinstance(dense, UpcycledMLP):
                self._check_same(name, dense)
                continue
            if id(dense) not in made:
                self._check_apart(module, name, dense)
                made[id(dense)] = upcycled(name, dense, **self.options)
        if made:
            before = _count(module)
            for name, other in list(module.named_modules(remove_duplicate=False)):
                if id(other) in made:  # a module used in several places stays one
                    parent, _, attribute = name.rpartition(".")
                    setattr(module.get_submodule(parent), attribute, made[id(other)])
            self._tell(module, chosen, before)
        self.layers = chosen
        return chosen

    def _matching(self, module: nn.Module) -> list[str]:
        every = [name for name, _ in module.named_modules() if name]
        # What lies inside what is upcycled already is ours.
        done = tuple(f"{name}." for name, inner in module.named_modules() if isinstance(inner, UpcycledMLP))
        every = [name for name in every if not name.startswith(done)]
        found: dict[str, None] = {}
        for pattern in self.patterns:
            matched = [name for name in every if _matches(name, pattern)]
            if not matched:
                near = difflib.get_close_matches(pattern, every, n=3, cutoff=0.0)
                raise ValueError(
                    f"MoEUpcycle: {pattern!r} matches no module of {type(module).__name__}; * stands for one part of a"
                    f" name. The nearest are {', '.join(near)}"
                    + (
                        "; modules made in LightningModule.setup come too late: make them in configure_model"
                        * _late(module)
                    )
                )
            found.update(dict.fromkeys(matched))
        order = {name: place for place, name in enumerate(every)}
        return sorted(found, key=order.__getitem__)

    def _check_same(self, name: str, layer: UpcycledMLP) -> None:
        has = layer.num_experts
        if has != self.options["num_experts"]:
            raise ValueError(
                f"MoEUpcycle(num_experts={self.options['num_experts']}): {name} is upcycled already, to {has} experts;"
                f" set num_experts={has}, or begin with the dense module"
            )

    def _check_apart(self, module: nn.Module, name: str, dense: nn.Module) -> None:
        own = {id(parameter): fqn for fqn, parameter in dense.named_parameters()}
        inside = {id(inner) for inner in dense.modules()}
        for other, holder in module.named_modules():
            shared = next((own[id(p)] for p in holder.parameters(recurse=False) if id(p) in own), None)
            if id(holder) not in inside and shared is not None:
                raise ValueError(
                    f"MoEUpcycle: {name}.{shared} is a parameter of {other or 'the root'} too, and copies of it would"
                    " not be; untie it, or leave this MLP out"
                )

    def _tell(self, module: nn.Module, chosen: list[str], before: int) -> None:
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
        """Upcycle the module, whatever is run, so that weights with experts can be loaded; in fit, adopt the step.

        Raises:
            ValueError: As `upcycle`; or the user's own backward would miss the balance loss.
        """
        try:
            self.upcycle(pl_module)
        except ValueError:
            if not is_overridden("configure_model", pl_module):
                raise
            call._call_configure_model(trainer)  # which may be called again, by its contract
            self.upcycle(pl_module)
        if stage != "fit" or not self._adds_loss:
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "MoEUpcycle adds the balance loss to what training_step returns, which manual optimization does not"
                " use; set balance_loss=0 and z_loss=0, or use automatic optimization"
            )
        self._leave()
        self._leave = wrap_method(pl_module, "training_step", _add_losses)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module its own `training_step` back."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same."""
        self._leave()

    def state_dict(self) -> dict[str, Any]:
        """Which layers are experts, so that resuming without this callback is warned of."""
        return {"layers": list(self.layers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the checkpoint is of the same layers.

        Raises:
            ValueError: It is not.
        """
        if state_dict["layers"] != self.layers:
            raise ValueError(
                f"MoEUpcycle: the checkpoint has experts at {', '.join(state_dict['layers'])}, and the module at"
                f" {', '.join(self.layers)}; use the pattern and every= that it was made with"
            )


def _nothing() -> None:
    pass


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _late(module: nn.Module) -> bool:
    return isinstance(module, LightningModule) and is_overridden("setup", module)


def _quoted(patterns: Sequence[str]) -> str:
    return ", ".join(map(repr, patterns))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# -- the step ---------------------------------------------------------------------------------------------------------


def _add_losses(module: LightningModule, run: Callable[[], Any]) -> Any:
    """A training step whose loss has the auxiliary losses of the layers that ran in it."""
    with taking_asides(AuxiliaryLoss) as taken:
        output = run()
    return _with_losses(module, output, [aside.value for aside in taken])


def _with_losses(module: LightningModule, output: Any, losses: list[Tensor]) -> Any:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not losses or not isinstance(loss, Tensor):
        return output
    # One after the other: in a pipeline the sum so far goes along with the activations.
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
