"""Copies of parameters on tensor and context ranks, which must stay equal to the bit.

Each of these ranks computes the same gradients of a parameter that it does not shard, and steps its own copy. A kernel
that adds in any order may round them differently, and nothing would bring the copies together again. So their digests
are compared once in a while; where they differ, the first rank's parameters and states of optimizers are broadcast.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.collectives.tensors import broadcast_buffer, digest_of_bits
from lightning_hybrid.params.guards import below_read_guards

_BATCHES = 100  # between comparisons: each reads the parameters once, and the host waits for it


class CopiedParameters:
    """The parameters of a rank that the ranks of a group hold alike, and the optimizers that step them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Prepare; ``parameters``, by FQN, hold full tensors or the same shards of them. The group is on ``device``."""
        self._parameters, self._optimizers, self._group, self._device = parameters, optimizers, group, device
        self._num_batches, self._has_warned = 0, False

    @torch.no_grad()
    @below_read_guards
    def before_batch(self) -> None:
        """Compare the copies if it is time; collective over the group."""
        self._num_batches += 1
        if self._num_batches % _BATCHES == 0 and (differing := self._differing()):
            self._broadcast(differing)

    def _differing(self) -> list[str]:
        digests = torch.stack([digest_of_bits(parameter).to(self._device) for parameter in self._parameters.values()])
        ends = torch.stack([digests, -digests])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._group)
        highest, lowest = ends[0], -ends[1]
        return [name for name, differs in zip(self._parameters, (highest != lowest).tolist(), strict=True) if differs]

    def _broadcast(self, names: Sequence[str]) -> None:
        if not self._has_warned and self._group.rank() == 0:
            warnings.warn(
                f"{len(names)} parameters have drifted apart between {self._group.size()} ranks that hold copies of"
                f" them ({', '.join(names[:3])}{', ...' if names[3:] else ''}): a kernel adds in any order. All ranks"
                " have taken those of the first, and will again without a message; Trainer(deterministic=True) selects"
                " kernels that add in one order",
                stacklevel=2,
            )
        self._has_warned = True
        for name in names:
            parameter = self._parameters[name]
            states = [optimizer.state[parameter] for optimizer in self._optimizers if parameter in optimizer.state]
            tensors = [state[key] for state in states for key in sorted(state) if type(state[key]) is Tensor]
            for tensor in (parameter.data, *tensors):
                broadcast_buffer(tensor, 0, self._group, self._device)
