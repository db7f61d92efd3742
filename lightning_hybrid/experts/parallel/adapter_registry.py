"""Registry of expert adapters; users add one for a module with another calling convention."""

from __future__ import annotations

from torch import nn

from lightning_hybrid.experts.parallel.batched_expert_adapters import BatchedPairs, BatchedRows, Call, ExpertsAdapter
from lightning_hybrid.experts.parallel.module_list_experts import ExpertList

# Mutable global: adapters must be registered on every rank before a strategy is set up.
_OWN: tuple[type[ExpertsAdapter], ...] = (BatchedPairs, BatchedRows, ExpertList)
_ADAPTERS: list[type[ExpertsAdapter]] = list(_OWN)


def register_experts(adapter: type[ExpertsAdapter]) -> type[ExpertsAdapter]:
    """Registers an adapter of the user's, which is tried before all others; usable as a decorator.

    Args:
        adapter: A class whose ``recognise`` returns instances for the modules that it supports.

    Raises:
        TypeError: The argument is no subclass of ``ExpertsAdapter``.
    """
    if not (isinstance(adapter, type) and issubclass(adapter, ExpertsAdapter)):
        raise TypeError(f"register_experts({adapter!r}): give a subclass of lightning_hybrid.experts.ExpertsAdapter")
    if adapter not in _ADAPTERS:
        _ADAPTERS.insert(0, adapter)
    return adapter


def candidate_adapters(module: nn.Module, call: Call) -> list[ExpertsAdapter]:
    """Returns adapters that may fit a module with full parameters, the most likely first."""
    return [candidate for adapter in _ADAPTERS for candidate in adapter.recognise(module, call)]


def has_further_adapters() -> bool:
    """Returns whether users have registered adapters."""
    return len(_ADAPTERS) > len(_OWN)
