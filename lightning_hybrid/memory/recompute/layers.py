"""Activation checkpointing of layers, each by its policy: full recomputation, or selective recomputation.

With "full" a layer saves its inputs alone, and its forward is repeated in the backward with the random numbers, buffers
and parameter shards of the first run, so results are bitwise those of a run that saves everything (Chen et al. 2016,
section 3; PyTorch's non-reentrant checkpoint). With "selective" it also keeps results of products (``selective``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_hybrid.memory.recompute.budget import BudgetedLayers
from lightning_hybrid.memory.recompute.policies import Policy, is_selective
from lightning_hybrid.memory.recompute.selective import LayerRun, SelectedResults, plain_tensors
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.predict.ranks import SELECTIVE_SHARE
from lightning_hybrid.step.objects.modules import copied, may_change

_TENSOR_TYPES = (Tensor, nn.Parameter)


class Recomputation:
    """Applies checkpointing policies to the layers of one module on this rank.

    Attributes:
        policies: Policy of each layer of the module by FQN.
        budget: Chooses what selective layers keep, instead of a share; None without a budget.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        policies: Mapping[str, Policy],
        *,
        keyed: bool = False,
        budget: BudgetedLayers | None = None,
    ) -> None:
        """Selects the layers on this rank that are recomputed; ``keyed`` random numbers need no generator states."""
        self._keyed = keyed
        self.budget = budget
        self.policies = dict(policies)
        self._layers = {fqn: layer for fqn, layer in layers.items() if policies[fqn] != "keep"}
        self._next_runs: dict[str, Callable[[list[Tensor]], LayerRun | None]] = {}  # of selective layers
        for fqn in self._layers:
            policy = self.policies[fqn]
            if is_selective(policy):
                chosen = SelectedResults(policy if isinstance(policy, float) else SELECTIVE_SHARE)
                self._next_runs[fqn] = chosen.next_run if budget is None else partial(budget.next_run, fqn)

    def running(self) -> AbstractContextManager[None]:
        """Replaces the layers' forwards inside the context by checkpointed ones."""
        return replaced_forwards(self._layers, self._recomputed, reason="recomputes layers in the backward")

    def _recomputed(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            # Transforms of torch.func save tensors without hooks, and so cannot save less.
            if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
                return forward(*args, **kwargs)
            if fqn not in self._next_runs:
                return self._checkpointed(fqn, forward, args, kwargs)
            layer_run = self._next_runs[fqn](list(plain_tensors((args, kwargs))))
            if layer_run is None:
                return forward(*args, **kwargs)
            out = self._checkpointed(fqn, forward, args, kwargs, context_fn=layer_run.contexts)
            layer_run.returned(out)
            return out

        return run

    def _checkpointed(self, fqn: str, forward: Callable[..., Any], args: Any, kwargs: Any, **how: Any) -> Any:
        state = _ModuleState(self._layers[fqn])
        versions = [(x, x._version) for x in pytree.tree_leaves((args, kwargs)) if type(x) in _TENSOR_TYPES]
        inputs: tuple[Any, Any] = args, kwargs
        if any(map(may_change, (*args, *kwargs.values()))):  # a cache that the layer fills, say
            inputs = copied((args, kwargs), lambda tensor: tensor, modules=False)
        is_repeated = False

        def once() -> Any:
            nonlocal is_repeated
            if not is_repeated:
                is_repeated = True
                return forward(*args, **kwargs)
            for number, (tensor, version) in enumerate(versions):
                if tensor._version != version:
                    raise RuntimeError(
                        f"{fqn} is recomputed in the backward, and its input {number} of shape"
                        f" {list(tensor.shape)} was changed in place since it ran (version {tensor._version}, was"
                        f" {version}); write `x = x + y` for `x += y`, or set recompute={{{fqn!r}: 'keep'}}"
                    )
            with state.restored():
                return forward(*inputs[0], **inputs[1])

        return torch.utils.checkpoint.checkpoint(once, use_reentrant=False, preserve_rng_state=not self._keyed, **how)


class _ModuleState:
    """Snapshot of a layer's buffers, and of tensors in place of parameters, for its recomputation.

    Buffers are copied, so the layer's own are not written again. Tensors that ``torch.func.functional_call`` puts in
    place of parameters are removed again before the recomputation.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._entries: list[tuple[dict[str, Any], str, Tensor, bool]] = []  # dict, name, tensor, whether it is a copy
        for module in layer.modules():
            for name, tensor in module._parameters.items():
                if tensor is not None and type(tensor) is not nn.Parameter:
                    self._entries.append((module._parameters, name, tensor, False))
            for name, buffer in module._buffers.items() if layer.training else ():
                if buffer is not None:
                    self._entries.append((module._buffers, name, buffer.detach().clone(), True))

    @contextmanager
    def restored(self) -> Iterator[None]:
        now = [members[name] for members, name, *_ in self._entries]
        for members, name, before, is_copy in self._entries:
            members[name] = before.clone() if is_copy else before
        try:
            yield
        finally:
            for (members, name, *_), tensor in zip(self._entries, now, strict=True):
                members[name] = tensor
