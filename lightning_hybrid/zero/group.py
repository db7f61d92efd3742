"""A group of parameters of one layer that are sharded over ranks, gathered, freed and reduced together.

    between steps   each rank has the local shard of each parameter, of its gradient and of its optimizer state
    gather          all-gather of the shards; the parameters are full
    forward, backward
    reduce          each rank gets its shard of the gradients, averaged over all replicas (a reduce-scatter)
    reshard         full tensors are freed (ZeRO-3), or kept for the next gather to write into (ZeRO-1 and 2)

It is always the user's own ``Parameter`` object; only its data changes. One message carries all parameters of one
dtype, rank by rank, each rank's shard padded to the size of the largest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.tensors import aligned_numel
from lightning_hybrid.host_copies import HostReads
from lightning_hybrid.optimizers.state_file import Region
from lightning_hybrid.params import store
from lightning_hybrid.params.guards import GatherCallbacks, below_read_guards, guard, unguard
from lightning_hybrid.params.placement import Shard
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.slow_links.average import CompressedAverage
from lightning_hybrid.step.objects.tensors import GradientObserver, gradient_dtype
from lightning_hybrid.zero.messages import GradientMessages
from lightning_hybrid.zero.ranks import ShardRanks
from lightning_hybrid.zero.rows import ShardRows
from lightning_hybrid.zero.storage import StorageDevices, StoredShards
from lightning_hybrid.zero.writes import GroupWrites

# torch 2.13 gave the collectives on single tensors new names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ParameterGroup:
    """Sharded parameters that are gathered, freed and reduced together.

    Attributes:
        fqn: Of the layer, for messages.
        parameters: By FQN.
        keeps_full: Whether the memory of full parameters is kept between steps.
        is_full: Whether the parameters hold full tensors.
        trained: FQNs of those that take gradients in this step.
        messages: In which their gradients are reduced.
        ranks: Over which they are sharded.
        writes: What a step of the user has written to those that are sharded.
    """

    def __init__(
        self,
        fqn: str,
        parameters: Mapping[str, nn.Parameter],
        placements: Mapping[str, Shard],
        ranks: ShardRanks,
        *,
        keeps_full: bool,
        devices: StorageDevices | None = None,
        region: Region | None = None,
        sparse: Collection[str] = (),
    ) -> None:
        """Take over parameters that hold local shards.

        They are of one dtype; those without a placement are full on every rank. ``region`` is of a file, for
        ``bytes_of_shards`` bytes; gradients of ``sparse`` ones are sparse in their first dim.
        """
        self.fqn, self.parameters, self.ranks, self.keeps_full = fqn, dict(parameters), ranks, keeps_full
        self._size, self._rank = ranks.shard.size(), ranks.shard.rank()
        self._placements = {name: placements[name] for name in parameters if name in placements}
        self.region = region
        self._empty = next(iter(parameters.values())).data.new_empty(0)  # on the compute device
        self._sent_dtype = ranks.gather_dtype or self._empty.dtype
        shards = {name: parameters[name].data for name in self._placements}
        self._shards = StoredShards(shards, devices or StorageDevices.of((), self._empty.device), region)
        for name in self._placements:
            store.reshard(parameters[name], self._shards.shown(name))
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.writes = GroupWrites({name: parameters[name] for name in self._placements})
        self.messages = GradientMessages(shapes, self._placements, ranks, sparse)
        self._rows = ShardRows({name: shapes[name] for name in self._placements}, self._placements, self._size)
        self._row_numel = aligned_numel(self._rows.numel, self._sent_dtype)
        self._no_value = float("nan") if self._empty.is_floating_point() or self._empty.is_complex() else 0
        self._nothing = self._empty.new_empty(())
        self._freed: dict[str, Tensor] = {}  # of the full shapes, without memory
        self._own_views: dict[str, tuple[Sequence[int], Sequence[int], int]] = {}  # size, stride and offset of shards
        for name, placement in self._placements.items():
            shape = [placement.length if dim == placement.dim else n for dim, n in enumerate(shapes[name])]
            self._freed[name] = self._nothing.expand(shape)
            own = placement.view(torch.empty(shape, device="meta"), self._rank, self._size)
            self._own_views[name] = own.shape, own.stride(), int(own.storage_offset())
        self._full: dict[str, Tensor] = {}
        self._gathering: tuple[dist.Work, Tensor] | None = None
        self._gradients: dict[str, Tensor | None] = {}  # this rank's shards, while parameters are full
        self._accumulated: dict[str, Tensor] = {}  # full ones of earlier batches, to which hooks see the present added
        self._unused: dict[str, Tensor] = {}  # the same, of parameters that this rank has not gathered
        self.is_full = self._is_pinned = self._is_read = False
        self._state_at_pin: dict[str, tuple[int, int]] = {}
        self.trained: list[str] = []
        self._on_read: GatherCallbacks | None = None  # gathers for code outside the layer, where such code is guarded
        self._gather_group = ranks.shard
        self._observer: GradientObserver | None = None
        self._on_averages: Callable[[ParameterGroup], None] | None = None  # called once averages are in the shards

    def train(self, names: Sequence[str]) -> None:
        """Reduce the gradients of these parameters, from the next backward on."""
        self.trained = list(names)

    def gather_through(self, groups: Mapping[dist.ProcessGroup, dist.ProcessGroup]) -> None:
        """Send shards through another group of the same ranks, by the group of the shard, that nothing else uses."""
        self._gather_group = groups[self.ranks.shard]

    def guard_reads(self, gather: GatherCallbacks) -> None:
        """Gather parameters when code outside the layer reads them."""
        self._on_read = gather

    def observe(self, observer: GradientObserver) -> None:
        """Let an observer see gradients before and after they are reduced."""
        self._observer = observer

    def call_on_averages(self, call: Callable[[ParameterGroup], None]) -> None:
        """Call a function once averages are in the shards."""
        self._on_averages = call

    # -- parameters ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @below_read_guards
    def launch_gather(self) -> None:
        """Start the all-gather of the shards, unless it has run or is under way; does not wait."""
        if self.is_full_or_gathering or self._is_pinned:
            return
        self.move_to_storage()
        self._gathering = self._send()

    @property
    def has_own_shards(self) -> bool:
        """Whether shards have other memory than full parameters, which are rounded, or freed between steps."""
        return not self.keeps_full or self._sent_dtype != self._empty.dtype

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has shards, and not all of each parameter."""
        return bool(self._placements)

    @property
    def is_full_or_gathering(self) -> bool:
        """Whether the parameters are full, or being gathered."""
        return self.is_full or self._gathering is not None or not self._placements

    def _send(self) -> tuple[dist.Work, Tensor]:
        message = self._empty.new_zeros(self._row_numel, dtype=self._sent_dtype)
        own = self._rows.own(message)
        torch._foreach_copy_(list(own.values()), [self._shards[name] for name in own])
        self._shards.evict_from_memory()
        received = message.new_empty(self._size * message.numel())
        return all_gather_single(received, message, group=self._gather_group, async_op=True), received

    @torch.no_grad()
    @below_read_guards
    def join_gather(self, unneeded: list[tuple[dist.Work, Tensor]], *, is_needed: bool) -> None:
        """Send the shards in an all-gather of all ranks.

        ``unneeded`` gets its work, and the flat tensor that receives, if the result is not used here.
        """
        if is_needed and not self.is_full_or_gathering:
            self.move_to_storage()
            self._gathering = self._send()
        else:
            unneeded.append(self._send())

    @torch.inference_mode(False)  # an evaluation may run in it, and a later step writes to these tensors
    @torch.no_grad()
    @below_read_guards
    def gather(self) -> None:
        """Wait for the all-gather: parameters are full from now on, and have no gradients yet."""
        if self.is_full:
            return
        unguard(self.parameters.values(), "replicas")
        if self._is_pinned:
            self._check_unchanged()
        self.launch_gather()
        if self._gathering is not None:
            work, received = self._gathering
            work.wait()
            self._gathering = None
            self._unpack(received.view(self._size, -1))
        for name, parameter in self.parameters.items():
            if name not in self._gradients:
                self._set_gradient_aside(name, parameter)
            if name in self._placements:
                store.gather(parameter, self._full[name])
        self.is_full = True
        self.writes.begin()

    def _unpack(self, rows: Tensor) -> None:
        """Copy the shards of all ranks, [ranks, numel], into the full parameters."""
        missing = [name for name in self._freed if name not in self._full]
        self._full.update((name, self._empty.new_empty(self._freed[name].shape)) for name in missing)
        self._rows.read(rows, self._full)
        if not self.has_own_shards:
            for name, full in self._full.items():
                self._shards.move(name, self._shard_of(name, full, self._rank))

    @torch.compiler.disable  # of a layer that the user has compiled
    @below_read_guards
    def free(self) -> None:
        """Free full parameters between a layer's forward and its backward; their shape stays the full one."""
        if self.is_full and not self.keeps_full and not self._is_read:
            self.writes.collect(self._full)
            self._write_back()
            self._nothing.fill_(self._no_value)  # what reads find that nothing intercepts
            for name, freed in self._freed.items():
                store.free(self.parameters[name], freed)
            self._full = {}
            self.is_full = False
            self.gather_on_read()

    def gather_on_read(self) -> None:
        """Gather the group when code outside its layer reads a parameter, until the step ends."""
        if self._on_read is not None and not self.is_full:
            guard([self.parameters[name] for name in self._placements], "replicas", self._on_read)

    def gather_until_step_end(self) -> None:
        """Gather the parameters and keep them full until the step ends: code outside the layer reads them."""
        self._is_read = True
        self.gather()

    @below_read_guards
    def reshard(self) -> None:
        """Reshard: parameters and their gradients are local shards again."""
        self._is_read = False
        self.messages.abandon()  # of a step that has failed; there is none otherwise
        unguard(self.parameters.values(), "replicas")
        if self._gathering is not None:  # of a layer that was not called
            self._gathering[0].wait()
            self._gathering = None
        if self.is_full:
            self.writes.collect(self._full)
        if self.is_full and self.has_own_shards and not self._is_pinned:
            self._write_back()
        for name in self._gradients:  # of parameters that were gathered; others show their shards already
            self.parameters[name].grad = None
        for name in self._placements:
            store.reshard(self.parameters[name], self._shards.shown(name))
        for name, gradient in self._gradients.items():
            if gradient is not None and name in self._placements:
                gradient = self._shards.shown_gradient(gradient)
            self.parameters[name].grad = gradient
        self._gradients, self._accumulated, self._unused = {}, {}, {}
        if not self.keeps_full and not self._is_pinned:
            self._full = {}
        self.is_full = False

    @torch.no_grad()
    def _write_back(self) -> None:
        """Copy what a step may have written to full parameters into the local shards."""
        own = {name: full.as_strided(*self._own_views[name]) for name, full in self._full.items()}
        self._shards.write(own, read_as=self._sent_dtype)
        self._shards.evict_from_memory()

    @below_read_guards
    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Gather the gradients of earlier batches into full parameters; collective, unless they are full already."""
        axis = AxisSharding(self.ranks.shard, self._placements)
        for name, gradient in self._gradients.items():
            parameter = self.parameters[name]
            if gradient is not None and name in self._placements and gradient.shape != parameter.shape:
                gradient = axis.unshard(gradient, self._placements[name])
            parameter.grad = gradient
        self._gradients = {}

    @below_read_guards
    def shard_gradients(self) -> None:
        """Keep this rank's shards of the gradients of full parameters."""
        for name, parameter in self.parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and name in self._placements:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                gradient = self._shard_of(name, dense, self._rank).clone()
            self._gradients[name] = gradient

    @below_read_guards
    def move_to_storage(self) -> None:
        """Move shards that were shown on another device back to storage, as a step begins."""
        if self._is_pinned:
            return
        for name in self._shards.move_to_storage():
            self._set_gradient_aside(name, self.parameters[name])
            store.move(self.parameters[name], self._shards[name])

    def _set_gradient_aside(self, name: str, parameter: nn.Parameter) -> None:
        """Set the gradient of earlier batches aside while a step runs."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and name in self._placements:
            gradient = self._shards.stored_gradient(gradient)
        self._gradients[name] = gradient

    def read_ahead(self) -> None:
        """Begin to read shards that are in a file."""
        if self.region is not None and not self.is_full and self._gathering is None:
            self.region.read_ahead()

    @below_read_guards
    def invalidate_lost(self) -> None:
        """Fill parameters with NaN if their file was truncated: a read of it would kill the process."""
        if self.region is not None and not self.region.file.is_complete:
            for name, parameter in self.parameters.items():
                if name in self._placements and parameter.data_ptr() == self._shards.address(name):
                    store.move(parameter, torch.full_like(parameter.data, float("nan")))

    def pin(self) -> None:
        """Gather, and reshard without freeing: until `unpin`, gathers need no other rank."""
        self.gather()
        self._is_pinned = True
        self.reshard()
        self._state_at_pin = self._state_of_shards()

    def unpin(self) -> None:
        """Free what `pin` has kept."""
        self._is_pinned = False
        self.reshard()

    def _state_of_shards(self) -> dict[str, tuple[int, int]]:
        return {name: (self.parameters[name]._version, self.parameters[name].data_ptr()) for name in self._placements}

    def _check_unchanged(self) -> None:
        """Check that parameters that are full for an evaluation have not been written."""
        now = self._state_of_shards()
        if changed := [name for name, before in self._state_at_pin.items() if now[name] != before]:
            raise RuntimeError(
                f"{', '.join(changed[:3])}{', ...' if changed[3:] else ''} of {self.fqn or 'the module'} were changed"
                " between the batches of an evaluation, for which they had been gathered; change them before it begins"
                " (on_validation_epoch_start is early enough), or set zero_stage=0"
            )

    def full_parameter(self, name: str) -> Tensor:
        """The tensor of full shape of a parameter; it must be gathered."""
        return self._full[name]

    def name_of_storage(self, storage: torch.UntypedStorage) -> str | None:
        """The parameter whose full tensor is in a storage, or None."""
        pointer = storage.data_ptr()
        found = (n for n, full in self._full.items() if full.untyped_storage().data_ptr() == pointer and full.numel())
        return next(found, None)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @below_read_guards
    def gather_accumulated(self, name: str) -> None:
        """Gather the gradient of earlier batches, before a step: a hook of the user gets it too; collective."""
        parameter = self.parameters[name]
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
        if (placement := self._placements.get(name)) is not None:
            gradient = AxisSharding(self.ranks.shard, self._placements).unshard(gradient, placement)
        self._accumulated[name] = gradient.to(self._empty.device)

    @below_read_guards
    def show_accumulated(self) -> None:
        """Let the last backward of a step add to what `gather_accumulated` has gathered."""
        for name, gradient in self._accumulated.items():
            if self.parameters[name].shape == gradient.shape:
                self.parameters[name].grad = gradient
                self._gradients[name] = None
            else:
                self._unused[name] = gradient
        self._accumulated = {}

    @torch.no_grad()
    @below_read_guards
    def launch_reduce(self) -> None:
        """Start to reduce this rank's gradients, and drop them; does not wait."""
        if not self.trained or self.messages.is_launched:
            return
        self.messages.begin(self.trained, self._empty.to(gradient_dtype(self.parameters[self.trained[0]])))
        self.messages.write(self._take_gradients())
        self.messages.launch()

    def _take_gradients(self) -> dict[str, Tensor]:
        """This backward's gradients, of the full shape, which parameters hold no longer."""
        taken = {}
        for name in self.trained:
            parameter = self.parameters[name]
            if name not in self._gradients:  # not gathered, so not used: a gradient here is of earlier batches
                self._set_gradient_aside(name, parameter)
            gradient, parameter.grad = parameter.grad, None
            if name in self._unused:
                gradient, self._gradients[name] = self._unused.pop(name), None
            if gradient is not None:
                if self._observer is not None:
                    self._observer.before_average(parameter, gradient)
                taken[name] = gradient
        return taken

    @property
    def has_arrived(self) -> bool:
        """Whether `receive_reduced` need not wait."""
        return self.messages.has_arrived

    @torch.no_grad()
    @below_read_guards
    def receive_reduced(self) -> None:
        """Wait for the message of `launch_reduce`, and free it: this rank's shard of it remains, or is added."""
        self.messages.receive()
        if self.messages.can_finish_early:
            self._add_averages()

    @torch.no_grad()
    @below_read_guards
    def complete_reduce(self, reads: HostReads) -> None:
        """Wait for the message of `launch_reduce`; ``reads`` read its flags with the flags of other groups."""
        if self.messages.is_launched:
            self.messages.complete(reads)

    @torch.no_grad()
    @below_read_guards
    def finish_reduce(self) -> None:
        """Wait, and add the averages to this rank's shards of the gradients.

        Raises:
            RuntimeError: A parameter got a further gradient after its reduction had been launched.
        """
        for name in self.trained:
            if self.parameters[name].grad is not None:
                raise RuntimeError(
                    f"{name} got another gradient after its average over the replicas had started; set"
                    " use_reentrant=False where a checkpointed function shares this parameter"
                )
        self._add_averages()

    def _add_averages(self) -> None:
        for name, new in self.messages.finish():
            if new is None:
                continue
            if name in self._placements:
                new = self._shards.stored_gradient(new)
            before = self._gradients.get(name)
            new = self._gradients[name] = new.clone() if before is None else before + new
            if self._observer is not None:
                self._observer.after_average(self.parameters[name], new)
        if self._on_averages is not None:
            self._on_averages(self)

    def compress(self, average: CompressedAverage) -> None:
        """Average gradients in compressed form from now on; sparse ones are sent as they are."""
        from lightning_hybrid.zero.compressed import CompressedGradientMessages

        self.messages = CompressedGradientMessages.of(self.messages, average)

    @contextlib.contextmanager
    def reduced_shards(self) -> Iterator[list[nn.Parameter]]:
        """Let parameters hold this rank's shards inside, and their averaged gradients, in the middle of a step.

        What is written to the shards is kept; a gradient that is None at the end is freed.

        Yields:
            The parameters that have a gradient.
        """
        names = [name for name, gradient in self._gradients.items() if gradient is not None]
        parameters = [self.parameters[name] for name in names]
        full = [parameter.data for parameter in parameters]
        unguard(parameters, "replicas")
        self._show_shards(names)
        try:
            yield parameters
        finally:
            for name, parameter, data in zip(names, parameters, full, strict=True):
                if parameter.grad is None:
                    self._gradients[name] = None
                shard = parameter.data
                store.swap_out(parameter, data, None)
                if name in self._placements and self.is_full and self.has_own_shards:
                    # What `reshard` writes back to the shard.
                    self._shard_of(name, self._full[name], self._rank).copy_(shard)
            self.writes.begin()
            self.gather_on_read()

    @below_read_guards
    def _show_shards(self, names: list[str]) -> None:
        if self.is_full and self.has_own_shards:  # with what the step has written
            self.writes.collect(self._full)
            self._write_back()
        for name in names:
            parameter = self.parameters[name]
            shard = self._shards.shown(name) if name in self._placements else parameter.data
            store.swap_in(parameter, shard, self._gradients[name])

    def _shard_of(self, name: str, full: Tensor, rank: int) -> Tensor:
        placement = self._placements.get(name)
        return full if placement is None else placement.view(full, rank, self._size)
