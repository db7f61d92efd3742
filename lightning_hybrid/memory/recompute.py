"""Activation checkpointing: layers that keep little for the backward, and compute the rest again there.

A policy is a value per layer, so that it can be chosen by hand, by a pattern, or by a solver. With "full" a layer keeps
its inputs alone and is run again as it ran: with the random numbers, the buffers and the parts of parameters of its
first run, so results are bitwise those of a run that keeps everything (Chen et al. 2016, section 3; PyTorch's
non-reentrant checkpoint). With "selective" single operations are repeated, and a layer keeps what is dear to make again
(``recomputable_values``, ``knapsack``).
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

from lightning_hybrid.memory.recomputable_values import Lender
from lightning_hybrid.memory.selective_layer import Dear
from lightning_hybrid.randomness.keyed_draws import replaced_forwards
from lightning_hybrid.step.objects.deep_copy import copied, may_change

Policy: TypeAlias = Literal["keep", "full", "selective"] | float
Recompute: TypeAlias = Policy | int | Sequence[str] | Mapping[str, Policy]
POLICIES = ("keep", "full", "selective")
SELECTIVE_SHARE = 0.4


def is_selective(policy: object) -> bool:
    """Whether single operations are computed again, and not the layer as a whole."""
    return policy == "selective" or isinstance(policy, float)


def _is_policy(policy: Any) -> bool:
    return policy in POLICIES if isinstance(policy, str) else isinstance(policy, float) and 0 < policy <= 1


_PLAIN = (Tensor, nn.Parameter)


class RecomputeError(ValueError):
    """What is to be recomputed is not there, or cannot be."""


def check_recompute(recompute: Any) -> None:
    """Refuse what says nothing.

    Args:
        recompute: As ``layer_policies`` takes it, or None.

    Raises:
        ValueError: It is none of these.
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
        " is dear to compute, a whole number n for every n-th, names of layers such as ['model.layers.*'], or a"
        " mapping of names to 'full', 'selective', a share or 'keep'"
    )


def layer_policies(recompute: Recompute | None, layers: Collection[str]) -> dict[str, Policy]:
    """What each layer does.

    Args:
        recompute: A policy for all ("keep", "full", "selective", or a float: the share of bytes that a selective layer
            keeps); n for every n-th layer, beginning with the first; FQNs with wildcards (``*``) of layers that are
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
    """The layers of one module on this rank, some of which are computed again.

    Attributes:
        policies: Of all layers of the module.
    """

    def __init__(self, layers: Mapping[str, nn.Module], policies: Mapping[str, Policy], *, keyed: bool = False) -> None:
        """Say what is recomputed.

        Args:
            layers: Of the module that are here, by FQN.
            policies: Of all its layers.
            keyed: Random numbers are keyed, so that no state of a generator need be kept.
        """
        self._keyed = keyed
        self.policies = dict(policies)
        self._lender: Lender | None = None
        self._lent: Collection[str] = ()
        self._layers = {fqn: layer for fqn, layer in layers.items() if policies[fqn] != "keep"}
        self._dear: dict[float, Dear] = {}  # by share; like layers are alike

    def lend(self, lender: Lender, fqns: Collection[str]) -> None:
        """Hold none of the parameters of selective layers between their forward and their backward.

        Args:
            lender: Of the parameters.
            fqns: Of the layers.
        """
        self._lender, self._lent = lender, frozenset(fqns)

    def running(self) -> AbstractContextManager[None]:
        """Inside, the layers' forwards keep what their policies say."""
        return replaced_forwards(self._layers, self._recomputed)

    def _recomputed(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        policy = self.policies[fqn]
        if policy == "full":
            return self._checkpointed(fqn, forward)
        share = policy if isinstance(policy, float) else SELECTIVE_SHARE
        dear = self._dear.setdefault(share, Dear(share))
        if self._lender is not None and fqn in self._lent:
            return dear.keeping_none_of(self._lender, fqn, forward)
        return dear.keeping(forward)

    def _checkpointed(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        layer = self._layers[fqn]

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            first = _Members(layer)
            given = [(leaf, leaf._version) for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) in _PLAIN]
            as_given: tuple[Any, Any] = args, kwargs
            if any(map(may_change, (*args, *kwargs.values()))):  # a cache that the layer fills, say
                as_given = copied((args, kwargs), lambda tensor: tensor, modules=False)
            is_again = False

            def once() -> Any:
                nonlocal is_again
                if not is_again:
                    is_again = True
                    return forward(*args, **kwargs)
                for number, (tensor, version) in enumerate(given):
                    if tensor._version != version:
                        raise RuntimeError(
                            f"{fqn} is computed again in the backward, and its input {number} of shape"
                            f" {list(tensor.shape)} was changed in place since it ran (version {tensor._version}, was"
                            f" {version}); write `x = x + y` for `x += y`, or set recompute={{{fqn!r}: 'keep'}}"
                        )
                with first.put():
                    return forward(*as_given[0], **as_given[1])

            return torch.utils.checkpoint.checkpoint(once, use_reentrant=False, preserve_rng_state=not self._keyed)

        return run


class _Members:
    """What lies on a layer before it runs, and must for its second run.

    Buffers are copied: the second run writes to none of the layer's own. What lies where a parameter belongs, and is
    none (``torch.func.functional_call``), is gone by then.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._held: list[tuple[dict[str, Any], str, Tensor, bool]] = []
        for module in layer.modules():
            for name, tensor in module._parameters.items():
                if tensor is not None and type(tensor) is not nn.Parameter:
                    self._held.append((module._parameters, name, tensor, False))
            for name, buffer in module._buffers.items() if layer.training else ():
                if buffer is not None:
                    self._held.append((module._buffers, name, buffer.detach().clone(), True))

    @contextmanager
    def put(self) -> Iterator[None]:
        now = [members[name] for members, name, *_ in self._held]
        for members, name, before, is_copy in self._held:
            members[name] = before.clone() if is_copy else before
        try:
            yield
        finally:
            for (members, name, *_), tensor in zip(self._held, now, strict=True):
                members[name] = tensor
