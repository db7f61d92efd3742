"""Activation checkpointing of layers: policies, full recomputation, and selective recomputation.

A policy is a value per layer, so that it can be chosen by hand, by a pattern, or by a solver. With "full" a layer saves
its inputs alone, and its forward is repeated in the backward with the random numbers, buffers and parameter shards of
the first run, so results are bitwise those of a run that saves everything (Chen et al. 2016, section 3; PyTorch's
non-reentrant checkpoint). With "selective" single operations are repeated, and a layer saves the results that are
expensive to recompute (``recomputable_values``, ``knapsack``).
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeAlias

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_hybrid.memory.recompute_values import ParameterGatherer
from lightning_hybrid.memory.selective_layer import SelectiveCheckpointing
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.objects.deep_copy import copied, may_change

Policy: TypeAlias = Literal["keep", "full", "selective"] | float
Recompute: TypeAlias = Policy | int | Sequence[str] | Mapping[str, Policy]
POLICIES = ("keep", "full", "selective")
SELECTIVE_SHARE = 0.4


def is_selective(policy: object) -> bool:
    """Returns whether a policy repeats single operations instead of the layer's full forward."""
    return policy == "selective" or isinstance(policy, float)


def _is_policy(policy: Any) -> bool:
    return policy in POLICIES if isinstance(policy, str) else isinstance(policy, float) and 0 < policy <= 1


_TENSOR_TYPES = (Tensor, nn.Parameter)


class RecomputeError(ValueError):
    """The layers that ``recompute`` names do not exist, or cannot be recomputed."""


def check_recompute(recompute: Any) -> None:
    """Validates the ``recompute`` option.

    Args:
        recompute: A value that ``layer_policies`` accepts, or None.

    Raises:
        ValueError: The value is neither.
    """
    if recompute is None or _is_policy(recompute):
        return
    if isinstance(recompute, int) and not isinstance(recompute, bool) and recompute >= 1:
        return
    if isinstance(recompute, Mapping) and all(map(_is_policy, recompute.values())):
        recompute = list(recompute)
    is_list = isinstance(recompute, Sequence) and not isinstance(recompute, str)
    if is_list and all(isinstance(name, str) for name in recompute):
        return
    raise ValueError(
        f"recompute={recompute!r}; use 'full' for all layers, 'selective' or a share of bytes such as 0.4 to keep what"
        " is expensive to compute, an integer n for every n-th, names of layers such as ['model.layers.*'], or a"
        " mapping of names to 'full', 'selective', a share or 'keep'"
    )


def layer_policies(recompute: Recompute | None, layers: Collection[str]) -> dict[str, Policy]:
    """Returns the policy of each layer by FQN.

    Args:
        recompute: A policy for all ("keep", "full", "selective", or a float: the share of bytes that a selective layer
            saves); n for every n-th layer, beginning with the first; FQNs with wildcards (``*``) of layers that are
            recomputed; or such patterns with a policy each, of which the last that matches a layer counts.
        layers: FQNs of all layers of the module, in order.

    Raises:
        RecomputeError: A pattern matches no layer.
    """
    if recompute is None or isinstance(recompute, str | float):
        policy: Policy = "keep" if recompute is None else recompute  # type: ignore[assignment]
        return dict.fromkeys(layers, policy)
    if isinstance(recompute, int):
        return {fqn: "keep" if number % recompute else "full" for number, fqn in enumerate(layers)}
    patterns: Mapping[str, Policy] = recompute if isinstance(recompute, Mapping) else dict.fromkeys(recompute, "full")
    policies: dict[str, Policy] = dict.fromkeys(layers, "keep")
    for pattern, policy in patterns.items():
        matched = fnmatch.filter(layers, pattern)
        if not matched:
            near = ", ".join(difflib.get_close_matches(pattern, layers, n=3, cutoff=0.0))
            raise RecomputeError(f"recompute: {pattern!r} is the name of no layer; the nearest are {near}")
        policies |= dict.fromkeys(matched, policy)
    return policies


class Recomputation:
    """Applies checkpointing policies to the layers of one module on this rank.

    Attributes:
        policies: Policy of each layer of the module by FQN.
    """

    def __init__(self, layers: Mapping[str, nn.Module], policies: Mapping[str, Policy], *, keyed: bool = False) -> None:
        """Selects the layers on this rank that are recomputed.

        Args:
            layers: Layers of the module on this rank, by FQN.
            policies: Policy of each layer of the module, by FQN.
            keyed: Random numbers are keyed, so that generator states need not be saved.
        """
        self._keyed = keyed
        self.policies = dict(policies)
        self._gatherer: ParameterGatherer | None = None
        self._gathered_layers: Collection[str] = ()
        self._layers = {fqn: layer for fqn, layer in layers.items() if policies[fqn] != "keep"}
        self._selective: dict[float, SelectiveCheckpointing] = {}  # by share; layers of one structure share choices

    def gather_on_read(self, gatherer: ParameterGatherer, fqns: Collection[str]) -> None:
        """Gathers parameters of selective layers on read, so that they are freed between forward and backward.

        Args:
            gatherer: Gathers the parameters.
            fqns: Selective layers whose parameters are freed.
        """
        self._gatherer, self._gathered_layers = gatherer, frozenset(fqns)

    def running(self) -> AbstractContextManager[None]:
        """Replaces the layers' forwards inside the context by checkpointed ones."""
        return replaced_forwards(self._layers, self._recomputed, reason="recomputes layers in the backward")

    def _recomputed(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        policy = self.policies[fqn]
        if policy == "full":
            return self._checkpointed(fqn, forward)
        share = policy if isinstance(policy, float) else SELECTIVE_SHARE
        checkpointing = self._selective.setdefault(share, SelectiveCheckpointing(share))
        if self._gatherer is not None and fqn in self._gathered_layers:
            return checkpointing.wrap_gathered(self._gatherer, fqn, forward)
        return checkpointing.wrap(forward)

    def _checkpointed(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        layer = self._layers[fqn]

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            state = _ModuleState(layer)
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

            return torch.utils.checkpoint.checkpoint(once, use_reentrant=False, preserve_rng_state=not self._keyed)

        return run


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
