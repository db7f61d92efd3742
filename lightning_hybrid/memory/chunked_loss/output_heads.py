"""Output heads whose losses are computed in chunks: linears outside of layers, which return lazy logits in a step."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_hybrid.memory.chunked_loss.lazy_logits import HeadCall, LazyLogits
from lightning_hybrid.memory.chunked_loss.loss_in_chunks import Autocast, RowLoss, RowOp, loss_in_chunks, map_chunks
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.standins.tensors import materialize
from lightning_hybrid.step.tracing.mode import user_line

Around = Callable[[nn.Module], AbstractContextManager[Any]]
# Fewer make products slow, and the sums of the weight's gradient over chunks; more save less memory.
_ROWS_OF_CHUNK = {"cpu": (256, 512), "cuda": (1024, 2048)}
_LOSSES = frozenset({"cross_entropy", "nll_loss"})


class Head:
    """An output head, and what its logits are read by.

    Attributes:
        fqn: FQN of the linear.
        has_loss: Whether a loss has read its logits.
        reads: Where operations have read its logits in full, by their names.
        chunks_of: The number of rows of the last loss, and of its chunks.
    """

    def __init__(self, fqn: str, module: nn.Linear, num_chunks: int | None, around: Around) -> None:
        self.fqn, self.module = fqn, module
        self._num_chunks, self._around = num_chunks, around
        self.forward: Callable[[Tensor], Tensor] = module.forward
        self.has_loss = False
        self.reads: dict[str, str] = {}
        self.chunks_of: tuple[int, int] | None = None

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits of shape (..., vocabulary) from hidden states of shape (..., features)."""
        return self.forward(hidden)

    def loss(self, rows: Tensor, target: Tensor, loss: RowLoss) -> Tensor:
        """Compute the loss of hidden states of shape (rows, features) and targets of shape (rows,) in chunks."""
        self.has_loss, count = True, self._count(len(rows))
        self.chunks_of = len(rows), count
        with self._around(self.module):
            return loss_in_chunks(rows, self.module.weight, self.module.bias, target, loss, count)

    def map_rows(self, rows: Tensor, function: RowOp, autocast: Autocast) -> Tensor:
        """Compute a function of logits of shape (rows, vocabulary), one value per row, in chunks, without gradients."""
        with self._around(self.module), autocast.entered():
            return map_chunks(rows, self.module.weight, self.module.bias, function, autocast, self._count(len(rows)))

    def _count(self, num_rows: int) -> int:
        """The number of chunks; by default such that a chunk has half as many rows as features, within limits."""
        least, most = _ROWS_OF_CHUNK.get(self.module.weight.device.type, _ROWS_OF_CHUNK["cuda"])
        count = self._num_chunks or math.ceil(num_rows / min(max(self.module.in_features // 2, least), most))
        return max(1, min(count, num_rows))

    def read_in_full(self, operation: str) -> None:
        """Note that an operation reads logits in full."""
        if operation in _LOSSES:
            self.has_loss = True
        self.reads.setdefault(operation, user_line())


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
    ) -> None:
        """Take linears outside of layers.

        Args:
            modules: The linears, by FQN.
            num_chunks: Number of chunks of each loss; by the sizes of the head if None.
            around: A context in which the parameters of a module are full.
            inform: Prints information, on the first rank.
            warn: Warns the user, on the first rank.
        """
        self.heads = {fqn: Head(fqn, module, num_chunks, around) for fqn, module in modules.items()}
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
        before = {fqn: (head.has_loss, dict(head.reads), head.chunks_of) for fqn, head in self.heads.items()}
        hook = register_optimizer_step_pre_hook(lambda *_: self._settle("an optimizer's step"))
        try:
            yield
            self._settle("the end of the step, which returns or stores them,")
        finally:
            hook.remove()
            self._calls = weakref.WeakSet()
            if not trains:  # an evaluation tells nothing of the training step
                for fqn, state in before.items():
                    self.heads[fqn].has_loss, self.heads[fqn].reads, self.heads[fqn].chunks_of = state
        if trains:
            self._report()

    def _settle(self, reason: str) -> None:
        """Compute the logits that something still refers to, with the weights of their call."""
        for call in list(self._calls):
            if not call.is_computed:
                call.head.read_in_full(reason)
                call.full_logits()

    @contextlib.contextmanager
    def running_step(self) -> Iterator[None]:
        """Both contexts, where nothing is between them."""
        with self.running(), self.step():
            yield

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
        chunked = [head for head in self.heads.values() if head.chunks_of is not None]
        for head in chunked:
            rows, count = head.chunks_of or (0, 0)
            self._inform(f"chunked_loss: the loss of {head.fqn} is computed in {count} chunks of {rows} rows")
        if not chunked:
            found = "; ".join(f"the result of {fqn} is read by {read}" for fqn, read in self._reported)
            self._warn(
                "chunked_loss: no cross entropy of an output head (a torch.nn.Linear outside of the repeated layers) is"
                f" computed in chunks{': ' + found if found else ''}; leave chunked_loss out"
            )
