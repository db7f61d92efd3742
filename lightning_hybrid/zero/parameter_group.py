"""Parameters of one layer that ranks share out: gathered together, freed together, their gradients reduced together.

    at rest         each rank holds its part of each parameter, of its gradient and of its optimizer's state
    gather          all_gather of the parts; the parameters are whole
    forward, backward
    reduce          each rank gets its part of the gradients, averaged over all replicas (a reduce-scatter)
    rest            the wholes are freed (ZeRO-3), or kept for the next gather to write into (ZeRO-1 and 2)

Whole or part, it is the user's own ``Parameter`` object: what changes is its data. One message carries all parameters
of one dtype, rank by rank, each rank's part padded to the size of the largest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.parts.gather_on_read import Gather, guard, unguard
from lightning_hybrid.parts.placement import Shard, join, padded
from lightning_hybrid.zero.memory_mapped_states import Region
from lightning_hybrid.zero.shard_layout import (
    ShardRanks,
    ShareObserver,
    nothing_of,
    numel_of,
    offsets_of,
    on_shards,
    refuse_changed,
    refuse_late,
    scattered,
)
from lightning_hybrid.zero.sparse_gradients import SparseRows
from lightning_hybrid.zero.storage_devices import Homes, PartsAtHome

# torch 2.13 gave the collectives on single tensors new names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ParameterGroup:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        fqn: Of the layer, for messages.
        parameters: By FQN.
        keeps_whole: Whether the memory of wholes is kept at rest.
        is_whole: Whether parameters hold wholes.
        trained: FQNs of those that take gradients in this step.
        on_read: How code outside of the layer has them gathered; None where it is known not to read them.
    """

    def __init__(
        self,
        fqn: str,
        parameters: Mapping[str, nn.Parameter],
        placements: Mapping[str, Shard],
        ranks: ShardRanks,
        *,
        keeps_whole: bool,
        homes: Homes | None = None,
        region: Region | None = None,
        sparse: Collection[str] = (),
    ) -> None:
        """At rest.

        Args:
            fqn: Of the layer.
            parameters: By FQN; of one dtype, and holding this rank's parts.
            placements: Of those that are cut; the others are whole on every rank.
            ranks: That share them out.
            keeps_whole: Whether the memory of wholes is kept at rest.
            homes: Where parts are; all on the device of the parameters if None.
            region: Of a file, for the parts; see ``bytes_of_parts``.
            sparse: FQNs of those whose gradients are sparse in their first dim.
        """
        self.fqn, self.parameters, self._ranks, self.keeps_whole = fqn, dict(parameters), ranks, keeps_whole
        self._size, self._rank = ranks.shard.size(), ranks.shard.rank()
        self._cut = {name: placements[name] for name in parameters if name in placements}
        self._rows = SparseRows({name: parameters[name] for name in sparse if name in parameters}, self._cut, ranks)
        self.region = region
        first = next(iter(parameters.values()))
        self._like = first.data.new_empty(0)  # on the device that computes
        parts = {name: parameters[name].data for name in self._cut}
        self._parts = PartsAtHome(parts, homes or Homes.of((), first.device), region)
        for name in self._cut:
            parameters[name].data = self._parts.shown(name)
        self._offsets, self._part_numel = offsets_of({name: self._largest_part(name) for name in self._cut})
        self._wholes: dict[str, Tensor] = {}
        self._gathering: tuple[dist.Work, Tensor] | None = None
        self._reducing: tuple[dist.Work | None, Tensor, list[str]] | None = None
        self._gradients: dict[str, Tensor | None] = {}  # this rank's parts, while parameters are whole
        self.is_whole = False
        self._is_held = False
        self._seen_at_hold: dict[str, tuple[int, int]] = {}
        self.trained: list[str] = []
        self.on_read: Gather | None = None
        self._is_read = False
        self.num_missing = 0  # gradients that the backward has not accumulated yet
        self.gathers_over = ranks.shard
        self.observer: ShareObserver | None = None

    # -- parameters ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @on_shards
    def launch_gather(self) -> None:
        """Send this rank's parts, unless the wholes are here or on their way; does not wait."""
        if self.is_on_its_way or self._is_held:
            return
        self.bring_home()
        self._gathering = self._send()

    @property
    def is_on_its_way(self) -> bool:
        """Whether wholes are here, or have been asked for."""
        return self.is_whole or self._gathering is not None or not self._cut

    def _send(self) -> tuple[dist.Work, Tensor]:
        message = self._like.new_zeros(self._part_numel)
        for name, offset in self._offsets.items():
            part = self._parts[name]
            message[offset : offset + part.numel()].view(part.shape).copy_(part)
        self._parts.let_go()
        received = self._like.new_empty(self._size * message.numel())
        return _all_gather(received, message, group=self.gathers_over, async_op=True), received

    @torch.no_grad()
    @on_shards
    def take_part(self, unneeded: list[tuple[dist.Work, Tensor]], *, is_needed: bool) -> None:
        """Send this rank's parts in a gather of all ranks; what it does not need, or has, goes to ``unneeded``."""
        if is_needed and not self.is_on_its_way:
            self.bring_home()
            self._gathering = self._send()
        else:
            unneeded.append(self._send())

    @torch.inference_mode(False)  # an evaluation may run in it, and a later step writes to these tensors
    @torch.no_grad()
    @on_shards
    def gather(self) -> None:
        """Wait for all parts: the parameters are whole from now on, their gradients new ones."""
        if self.is_whole:
            return
        unguard(self.parameters.values(), "replicas")
        if self._is_held:
            self._check_unchanged()
        self.launch_gather()
        if self._gathering is not None:
            work, received = self._gathering
            work.wait()
            self._gathering = None
            for name in self._cut:
                self._unpack(name, received)
        for name, parameter in self.parameters.items():
            if name not in self._gradients:
                self._take_gradient(name, parameter)
            if name in self._cut:
                parameter.data = self._wholes[name]
        self.is_whole = True

    def _unpack(self, name: str, received: Tensor) -> None:
        placement, part = self._cut[name], self._parts[name]
        whole = self._wholes.get(name)
        if whole is None:
            shape = list(part.shape)
            shape[placement.dim] = placement.length
            whole = self._wholes[name] = self._like.new_empty(shape)
        stride, offset = self._part_numel, self._offsets[name]
        for rank in range(self._size):
            if rank == self._rank and self.keeps_whole and part.untyped_storage() is whole.untyped_storage():
                continue  # this rank's part is a view of it
            target = self._part_of(name, whole, rank)
            place = rank * stride + offset
            target.copy_(received[place : place + target.numel()].view(target.shape))
        if self.keeps_whole:
            self._parts.move(name, self._part_of(name, whole, self._rank))

    @on_shards
    def free(self) -> None:
        """Free the memory of wholes between a layer's forward and its backward; parameters keep the wholes' shape."""
        if self.is_whole and not self.keeps_whole and not self._is_read:
            self._adopt_rebound()
            self._write_back()
            for name in self._cut:
                self.parameters[name].data = nothing_of(self.parameters[name])
            self._wholes = {}
            self.is_whole = False
            self.gather_on_read()

    def gather_on_read(self) -> None:
        """Until the step ends, code that reads one of the parameters outside of its layer has the group gathered."""
        if self.on_read is not None and not self.is_whole:
            guard([self.parameters[name] for name in self._cut], "replicas", self.on_read)

    def stay(self) -> None:
        """Code outside of the layer reads the parameters: they are full until the step ends."""
        self._is_read = True
        self.gather()

    @on_shards
    def rest(self) -> None:
        """Parameters hold their parts, and the parts of their gradients."""
        self._is_read = False
        unguard(self.parameters.values(), "replicas")
        if self._gathering is not None:  # of a layer that was not called
            self._gathering[0].wait()
            self._gathering = None
        if self.is_whole:
            self._adopt_rebound()
        if self.is_whole and not self.keeps_whole and not self._is_held:
            self._write_back()
        for name in self._gradients:  # of those that were whole since the last rest; others show theirs already
            self.parameters[name].grad = None
        for name in self._cut:
            self.parameters[name].data = self._parts.shown(name)
        for name, gradient in self._gradients.items():
            if gradient is not None and name in self._cut:
                gradient = self._parts.shown_gradient(gradient)
            self.parameters[name].grad = gradient
        self._gradients = {}
        if not self.keeps_whole and not self._is_held:
            self._wholes = {}
        self.is_whole = False

    @torch.no_grad()
    def _adopt_rebound(self) -> None:
        """Take over what a step has put in the place of wholes: ``p.data = 0.9 * p.data + 0.1 * q.data``."""
        for name in self._cut:
            data, whole = self.parameters[name].data, self._wholes[name]
            if data.data_ptr() != whole.data_ptr() and data.shape == whole.shape:
                whole.copy_(data)

    @torch.no_grad()
    def _write_back(self) -> None:
        """What a step may have written to wholes."""
        for name in self._cut:
            self._parts.write(name, self._part_of(name, self._wholes[name], self._rank))
        self._parts.let_go()

    @on_shards
    @torch.no_grad()
    def show_gradients(self) -> None:
        """Parameters, which are full, have full gradients of earlier batches too; collective."""
        for name, gradient in self._gradients.items():
            if gradient is not None and name in self._cut:
                gradient = self._joined(name, gradient)
            self.parameters[name].grad = gradient
        self._gradients = {}

    @on_shards
    def take_gradients(self) -> None:
        """Keep this rank's shards of the gradients that full parameters have."""
        for name, parameter in self.parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and name in self._cut:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                gradient = self._part_of(name, dense, self._rank).clone()
            self._gradients[name] = gradient

    def _joined(self, name: str, part: Tensor) -> Tensor:
        message = padded(part.to_dense() if part.is_sparse else part, self._cut[name]).contiguous()
        received = [torch.empty_like(message) for _ in range(self._size)]
        dist.all_gather(received, message, group=self._ranks.shard)
        return join(received, self._cut[name])

    @on_shards
    def bring_home(self) -> None:
        """A step begins: what is shown elsewhere than at home goes there."""
        if self._is_held:
            return
        for name in self._parts.bring_home():
            self._take_gradient(name, self.parameters[name])
            self.parameters[name].data = self._parts[name]

    def _take_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """What earlier batches left is set aside while a step runs."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and name in self._cut:
            gradient = self._parts.gradient_at_home(gradient)
        self._gradients[name] = gradient

    def read_ahead(self) -> None:
        """Begin to read parts that are in a file."""
        if self.region is not None and not self.is_whole and self._gathering is None:
            self.region.read_ahead()

    @on_shards
    def leave(self) -> None:
        """Nobody may read what was in a file that is gone: that would end the process."""
        if self.region is not None and not self.region.file.is_there:
            for name, parameter in self.parameters.items():
                if name in self._cut and parameter.data_ptr() == self._parts.address(name):
                    parameter.data = torch.full_like(parameter.data, float("nan"))

    def hold(self) -> None:
        """Gather, and rest without freeing: gathers need no other rank until `let_go`."""
        self.gather()
        self._is_held = True
        self.rest()
        self._seen_at_hold = self._state_of_parts()

    def let_go(self) -> None:
        """Free what was held."""
        self._is_held = False
        self.rest()

    def _state_of_parts(self) -> dict[str, tuple[int, int]]:
        return {name: (self.parameters[name]._version, self.parameters[name].data_ptr()) for name in self._cut}

    def _check_unchanged(self) -> None:
        now = self._state_of_parts()
        refuse_changed([name for name, seen in self._seen_at_hold.items() if now[name] != seen], self.fqn)

    def whole(self, name: str) -> Tensor:
        """The whole of one of the parameters; it must be gathered."""
        return self._wholes[name]

    def name_of(self, storage: torch.UntypedStorage) -> str | None:
        """Which whole lies in a storage."""
        pointer, wholes = storage.data_ptr(), self._wholes.items()
        return next((n for n, whole in wholes if whole.untyped_storage().data_ptr() == pointer and whole.numel()), None)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @on_shards
    def launch_reduce(self) -> None:
        """Send what this rank has of the gradients, and forget it; does not wait."""
        names = self.trained
        if not names or self._reducing is not None:
            return
        offsets, length = self._gradient_offsets(names)
        message = self._like.new_zeros(self._size, length + len(names))
        factor = 1.0 / self._ranks.num_replicas
        for index, name in enumerate(names):
            parameter = self.parameters[name]
            if name not in self._gradients:  # not gathered, so not used: what there is comes from earlier batches
                self._take_gradient(name, parameter)
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            message[:, length + index] = 1.0
            if self.observer is not None:
                self.observer.before_share(parameter, gradient)
            gradient = self._rows.put(name, gradient, message, offsets)
            for rank in range(self._size):
                part = self._part_of(name, gradient, rank)
                place = message[rank, offsets[name] : offsets[name] + part.numel()]
                torch.mul(part, factor, out=place.view(part.shape))
        self._reducing = (*scattered(message, self._ranks.shard), list(names))

    @torch.no_grad()
    @on_shards
    def finish_reduce(self) -> None:
        """Wait, and add the averages to this rank's parts of the gradients.

        Raises:
            RuntimeError: A parameter got a further gradient while its average was under way.
        """
        if self._reducing is None:
            return
        (work, received, names), self._reducing = self._reducing, None
        if work is not None:
            work.wait()
        total = received.sum(0) if received.shape[0] > 1 else received[0]
        if self._ranks.replicate.size() > 1:
            dist.all_reduce(total, group=self._ranks.replicate)
        offsets, length = self._gradient_offsets(names)
        for name, has in zip(names, total[length:].tolist(), strict=True):
            refuse_late(name, self.parameters[name].grad)
            if not has:
                continue
            shape = self._parts.shape(name) if name in self._cut else self.parameters[name].shape
            new = total[offsets[name] : offsets[name] + numel_of(shape)].view(shape)
            new = self._rows.taken(name, new, total, offsets)
            if name in self._cut:
                new = self._parts.gradient_at_home(new)
            before = self._gradients.get(name)
            new = self._gradients[name] = new.clone() if before is None else before + new
            if self.observer is not None:
                self.observer.after_share(self.parameters[name], new)

    def _part_of(self, name: str, whole: Tensor, rank: int) -> Tensor:
        if (placement := self._cut.get(name)) is None:
            return whole
        ((start, length),) = placement.ranges(rank, self._size)
        return whole.narrow(placement.dim, start, length)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _gradient_offsets(self, names: Sequence[str]) -> tuple[dict[str, int], int]:
        sizes = {n: self._largest_part(n) if n in self._cut else self.parameters[n].numel() for n in names}
        return offsets_of(sizes | self._rows.sizes(names))

    def _largest_part(self, name: str) -> int:
        placement, shape = self._cut[name], list(self._parts.shape(name))
        shape[placement.dim] = placement.local_length
        return numel_of(shape)
