"""Output heads whose losses are computed in chunks: linears outside of layers, which return lazy logits in a step."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_hybrid.logits.chunks import Around, FullRows, Head, ShardedRows
from lightning_hybrid.logits.lazy import HeadCall, LazyLogits
from lightning_hybrid.logits.vocabulary import Vocabulary
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.objects.modules import find_layers
from lightning_hybrid.step.standins.tensors import is_absent, materialize
from lightning_hybrid.step.tracing.compiled import compiled_modules


class ChunkedLoss:
    """Lets output heads return lazy logits, and reports what their losses do.

    Attributes:
        heads: The linears that may be output heads, by FQN; those whose logits no loss reads are removed.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Linear],
        num_chunks: int | None,
        *,
        around: Around,
        inform: Callable[[str], None],
        warn: Callable[[str], None],
        vocabularies: Mapping[str, Vocabulary] | None = None,
    ) -> None:
        """Takes linears outside of layers; a loss has as many chunks as the sizes of its head give if None.

        ``around`` is a context in which the parameters of a module are full; ``vocabularies`` are the row ranges of the
        linears whose weights and biases tensor ranks shard, by FQN.
        """
        rows = {fqn: ShardedRows(vocabulary) for fqn, vocabulary in (vocabularies or {}).items()}
        self.heads = {
            fqn: Head(fqn, module, num_chunks, around, rows.get(fqn, FullRows())) for fqn, module in modules.items()
        }
        self._inform, self._warn = inform, warn
        self._calls: weakref.WeakSet[HeadCall] = weakref.WeakSet()
        self._reported: set[tuple[str, str]] = set()
        self._is_first = True

    def running(self) -> AbstractContextManager[None]:
        """Inside, heads return lazy logits."""
        modules = {fqn: head.module for fqn, head in self.heads.items()}
        return replaced_forwards(modules, self._lazy, reason="computes losses in chunks")

    def _lazy(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        head = self.heads[fqn]
        head.forward = forward

        def run(*args: Any, **kwargs: Any) -> Any:
            hidden = materialize(args[0]) if len(args) == 1 and not kwargs else None
            has_hooks = head.module._backward_hooks or head.module._backward_pre_hooks  # which get the logits' gradient
            if has_hooks or not isinstance(hidden, Tensor) or hidden.dim() < 2 or not hidden.numel():
                return forward(*args, **kwargs)
            call = HeadCall(head, hidden)
            self._calls.add(call)
            return LazyLogits.of(call, head.module.out_features)

        return run

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around one run of a step: logits that it returns or stores are computed before weights change."""
        trains = torch.is_grad_enabled()
        before = {fqn: head.uses for fqn, head in self.heads.items()}
        hook = register_optimizer_step_pre_hook(lambda *_: self._settle("an optimizer's step"))
        try:
            yield
            self._settle("the end of the step, which returns or stores them,")
        finally:
            hook.remove()
            self._calls = weakref.WeakSet()
            if not trains:  # an evaluation tells nothing of the training step
                for fqn, uses in before.items():
                    self.heads[fqn].restore(uses)
        if trains:
            self._report()

    def _settle(self, reason: str) -> None:
        """Compute the logits that something still refers to, with the weights of their call."""
        for call in list(self._calls):
            if not call.is_computed:
                call.head.read_in_full(reason)
                call.full_logits()

    def _report(self) -> None:
        """Tell once which losses are computed in chunks, and what reads logits in full; drop linears without a loss."""
        for fqn, head in list(self.heads.items()):
            if not head.has_loss and head.reads:
                self.heads.pop(fqn)
                self._reported.add((fqn, next(f"{name} at {line}" for name, line in head.reads.items())))
                continue
            for operation, line in head.reads.items() if head.has_loss else ():
                if (fqn, operation) not in self._reported:
                    self._reported.add((fqn, operation))
                    self._inform(
                        f"chunked_loss: {operation} at {line} reads the logits of {fqn}, which are computed in full for"
                        " it; a cross entropy or an argmax over the vocabulary are computed in chunks"
                    )
        if not self._is_first:
            return
        self._is_first = False
        chunked = [head for head in self.heads.values() if head.chunks_of]
        for head in chunked:
            rows, count = head.chunks_of
            self._inform(f"chunked_loss: the loss of {head.fqn} is computed in {count} chunks of {rows} rows")
        if not chunked:
            found = "; ".join(f"the result of {fqn} is read by {read}" for fqn, read in self._reported)
            self._warn(
                "chunked_loss: no cross entropy of an output head (a torch.nn.Linear outside of the repeated layers) is"
                f" computed in chunks{': ' + found if found else ''}; leave chunked_loss out"
            )


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_output_heads(
    root: nn.Module, *, sharded: Collection[str], is_compiled: bool, any_size: bool
) -> dict[str, nn.Linear]:
    """Return the linears, by FQN, that are in no repeated layer, run uncompiled, and whose weights are here in full.

    Tensor ranks shard the parameters ``sharded``. ``any_size``: also those with no more outputs than inputs.
    """
    inside = _inside_repeated_layers(root) | compiled_modules(root)
    if is_compiled:
        layers = find_layers(dict(root.named_children())).values()
        inside |= {id(inner) for layer in layers for inner in layer.modules() if inner is not layer}
    sharded_ids = {id(parameter) for name, parameter in root.named_parameters() if name in sharded}
    return {
        fqn: module
        for fqn, module in root.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and id(module) not in inside
        and (any_size or module.out_features > module.in_features)
        and all(_is_plain(parameter) and id(parameter) not in sharded_ids for parameter in module.parameters())
    }


def sharded_heads(
    root: nn.Module, heads: dict[str, nn.Linear], vocabularies: Mapping[str, Vocabulary]
) -> dict[str, Vocabulary]:
    """The row ranges of heads that tensor ranks shard, by FQN, from the row ranges of parameters.

    Drops heads whose weight alone is sharded.
    """
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    found = {}
    for fqn, module in list(heads.items()):
        of_parameters = [vocabularies.get(names[id(parameter)]) for parameter in module.parameters()]
        if all(of_parameters):
            found[fqn] = vocabularies[names[id(module.weight)]]
        elif any(of_parameters):
            heads.pop(fqn)
    return found


def _inside_repeated_layers(root: nn.Module) -> set[int]:
    """The ids of modules inside of others whose list has several of their class."""
    inside: set[int] = set()
    for parent in root.modules():
        if isinstance(parent, _LISTS):
            classes = Counter(type(child) for child in parent.children())
            repeated = [child for child in parent.children() if classes[type(child)] > 1]
            inside |= {id(inner) for child in repeated for inner in child.modules() if inner is not child}
    return inside


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and not is_absent(parameter)
