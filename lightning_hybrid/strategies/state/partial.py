"""State dicts of a module are refused while parameters, or shards of them, are on other ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_hybrid.step.standins.tensors import FULL_SHAPE, is_absent


def refuse_partial_state(module: nn.Module, *_: Any) -> None:
    """A hook before ``state_dict()``, which would wait for ranks that may not call it too.

    Raises:
        RuntimeError: Parameters or buffers, or shards of them, are not on this rank.
    """
    absent_buffers = [name for name, buffer in module.named_buffers() if is_absent(buffer)]
    if elsewhere := missing_parameters(module) + absent_buffers:
        raise RuntimeError(
            f"{type(module).__name__}.state_dict() was called while {len(elsewhere)} of its parameters (such as"
            f" {elsewhere[0]!r}), or shards of them, are on other ranks; use trainer.save_checkpoint(...) or"
            " trainer.strategy.lightning_module_state_dict() on all ranks, or wait for the end of fit"
        )


def check_is_full(module: nn.Module, *_: Any) -> None:
    """Check that no run that failed has left this module sharded; also a state dict hook."""
    if elsewhere := missing_parameters(module):
        raise RuntimeError(
            f"a run that failed, was stopped or ended without room has left this {type(module).__name__} sharded:"
            f" {len(elsewhere)} of its {sum(1 for _ in module.parameters())} parameters (such as {elsewhere[0]!r}), or"
            " shards of them, are not"
            " on this rank, and cannot be gathered any more; make a new module and load a checkpoint"
        )


def missing_parameters(module: nn.Module) -> list[str]:
    """FQNs of parameters that are absent or sharded on this rank."""
    named = module.named_parameters()
    absent = [name for name, parameter in named if is_absent(parameter)]
    return list(dict.fromkeys(absent + _sharded_parameters(module)))


def _sharded_parameters(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if FULL_SHAPE in parameter.__dict__]
