"""Which adapters are tried, and how users add one for a module that calls its experts in another way."""

from __future__ import annotations

from torch import nn

from lightning_hybrid.experts.parallel.expert_adapters import BatchedPairs, BatchedRows, Call, ExpertsAdapter
from lightning_hybrid.experts.parallel.module_list_experts import ExpertList

# The one list that changes while a program runs: adapters must be known on every rank before a strategy is set up.
_ADAPTERS: list[type[ExpertsAdapter]] = [BatchedPairs, BatchedRows, ExpertList]


def register_experts(adapter: type[ExpertsAdapter]) -> type[ExpertsAdapter]:
    """Try an adapter of the user's before all others; usable as a decorator.

    Args:
        adapter: A class whose ``recognise`` answers for the modules that it knows.

    Raises:
        TypeError: It is no class of adapters.
    """
    if not (isinstance(adapter, type) and issubclass(adapter, ExpertsAdapter)):
        raise TypeError(f"register_experts({adapter!r}): give a subclass of lightning_hybrid.experts.ExpertsAdapter")
    if adapter not in _ADAPTERS:
        _ADAPTERS.insert(0, adapter)
    return adapter


def recognised(module: nn.Module, call: Call) -> list[ExpertsAdapter]:
    """Adapters that may fit a module, the likeliest first.

    Args:
        module: Of the user, whole.
        call: Positional and keyword arguments of a call of it.
    """
    return [found for adapter in _ADAPTERS for found in adapter.recognise(module, call)]
