"""Running averages of BatchNorm in a stage that several ranks hold: each runs some of the microbatches.

In training BatchNorm does not read its running averages, and c calls update them by::

    average -> (1 - momentum)^c * average + update

So each microbatch starts from averages of zero, which leaves the update alone. At the end of the step all ranks of the
stage apply the updates of all microbatches in their order, as one process does. Other buffers that a layer writes have
no such rule, and are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.errors import WITHOUT_STAGES, StepError
from lightning_hybrid.step.objects.modules import modules_in


class Averages(NamedTuple):
    """The averages of one layer, of shape (channels,), and the number of its calls, a scalar."""

    mean: Tensor
    variance: Tensor
    calls: Tensor

    @classmethod
    def of(cls, norm: _BatchNorm) -> Averages:
        """The buffers of a layer that has averages."""
        assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
        return cls(norm.running_mean, norm.running_var, norm.num_batches_tracked)

    def copy(self) -> Averages:
        """Averages of their own."""
        return Averages(*(each.clone() for each in self))


# By microbatch, then by FQN of the layer: what the microbatch adds to the averages.
Updates: TypeAlias = Mapping[int, Mapping[str, Averages]]


class RunningAverages:
    """The running averages of one rank's layers during one step.

    Attributes:
        updates: Of the microbatches that have run on this rank.
    """

    def __init__(self, root: nn.Module, buffers: Mapping[str, Tensor]) -> None:
        """Begin a step of a module; ``buffers`` are what this stage has, by FQN."""
        here = {id(buffer) for buffer in buffers.values()}
        self._norms = {
            name: module
            for name, module in (modules_in(root) if buffers else ())
            if isinstance(module, _BatchNorm) and module.training and id(module.running_mean) in here
        }
        self._before = {name: Averages.of(norm).copy() for name, norm in self._norms.items()}
        averages = {id(each) for norm in self._norms.values() for each in Averages.of(norm)}
        self._others = {name: (b, b._version) for name, b in buffers.items() if id(b) not in averages}
        self.updates: dict[int, dict[str, Averages]] = {}

    @contextlib.contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Run a microbatch inside, and collect its updates.

        Raises:
            StepError: It has written another buffer.
        """
        averages = [average for norm in self._norms.values() for average in Averages.of(norm)]
        # The graphs of microbatches in flight have saved them, and do not read them.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(averages)):
            for average in averages:
                average.zero_()
        yield
        self.updates[index] = {name: Averages.of(norm).copy() for name, norm in self._norms.items()}
        written = next((name for name, (b, version) in self._others.items() if b._version != version), None)
        if written is not None:
            raise StepError(
                f"the buffer {written!r} is written by a stage that stage_widths gives several ranks, each of which"
                " runs some of the microbatches: none has what all of them write. Give its stage one rank, or"
                f" {WITHOUT_STAGES}",
                entry="wide-buffers",
            )

    @torch.no_grad()
    def apply(self, updates: Updates) -> None:
        """Update the averages before the step by all microbatches, in their order."""
        for name, norm in self._norms.items():
            total = self._before[name]
            for _, found in sorted(updates.items()):
                update = Averages(*(each.to(total.mean.device) for each in found[name]))
                calls, added = total.calls.add_(update.calls), update.calls.double()
                if norm.momentum is None:  # the plain average of all calls
                    share: Tensor | float = added / calls.clamp_min(1)
                    rest = 1 - share
                else:
                    rest, share = (1 - norm.momentum) ** added, 1.0
                total.mean.mul_(rest).add_(update.mean * share)
                total.variance.mul_(rest).add_(update.variance * share)
            for average, content in zip(Averages.of(norm), total, strict=True):
                average.copy_(content)
