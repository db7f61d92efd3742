"""ZeRO's schedule on one rank: when parameters are gathered, when gradients are reduced, and when both are freed.

Two policies, with the same results:

* once per step: all layers are gathered as the step begins, each one's gradients are reduced in the step's last
  backward, and everything is freed at its end. One gather and one reduction per step, whatever the number of
  microbatches; within the step this rank holds all of its stages.
* per layer: gathered before its forward, freed after it, gathered again when a backward reaches its outputs, and freed
  when that comes to another layer, for each microbatch. Within the step this rank holds two layers at a time, and
  besides what is recomputed with them, since its backward follows.

All ranks of a shard launch the same collectives in the same order, whatever order a rank's code takes: by [Note: one
order] sums of gradients, and gathers of the first policy, go in the order of the layers. Gathers of the second policy
follow the calls, so before each the ranks agree on what comes (``GatherRounds``).

[Note: full in its backward] A backward reads parameters in more ways than saved tensors show: autograd functions and
hooks keep the ``Parameter`` object, code that runs again reads it, hooks of users save it as it is. So a layer is full
from the moment at which a backward reaches it, also if its gradients are complete before. Autograd runs nodes in the
reverse order of their making, so a backward that has come to another layer has left this one. What a backward saves in
turn, for a second one, is a view of the full tensor, never the ``Parameter`` object, whose data changes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.mesh import Mesh
from lightning_hybrid.optimizers.state_file import Region
from lightning_hybrid.params.guards import GatherCallbacks, ReadGuards
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.step.objects.pytree import tensors_inside
from lightning_hybrid.step.objects.tensors import GradientHook
from lightning_hybrid.techniques.technique import Active
from lightning_hybrid.zero.group import ParameterGroup
from lightning_hybrid.zero.ranks import ShardRanks
from lightning_hybrid.zero.reductions import Reductions, finish_reductions
from lightning_hybrid.zero.replica_writes import ReplicaWrites
from lightning_hybrid.zero.rounds import GatherRounds, agree_on_step
from lightning_hybrid.zero.saved_views import ParameterView, SavedViews

Stage = int | None  # None: gradients are complete only after all stages of this rank


class ZeroSharding(Active):
    """Gathers, frees and reduces the parameters of one rank's stages, sharded over the ranks of a shard group.

    Attributes:
        per_layer: Whether each layer is gathered separately (the second policy).
        running_layers: FQNs of layers whose forward runs.
        writes: Compared at the end of steps.
    """

    reduces_gradients = True

    def __init__(
        self,
        root: nn.Module,
        groups: Mapping[Stage, Sequence[ParameterGroup]],
        ranks: ShardRanks,
        device: torch.device,
        *,
        per_layer: bool,
        agreements: Sequence[HookAgreement] = (),
    ) -> None:
        """Take over groups of sharded parameters, and the ``agreements`` of ranks that hold shards of some.

        They are by the stage after whose last backward their gradients are complete, each in forward order. The FQN of
        a group is that of a layer whose forward is all that reads its parameters, or "".
        """
        self.per_layer = per_layer
        self._groups = {stage: list(members) for stage, members in groups.items()}
        self._all = [group for members in self._groups.values() for group in members]
        self._layers: dict[str, list[ParameterGroup]] = {}
        self._outside: list[ParameterGroup] = []  # read by code of more than one layer
        for group in self._all:
            if group.fqn:
                self._layers.setdefault(group.fqn, []).append(group)
            else:
                self._outside.append(group)
        self._modules = {fqn: root.get_submodule(fqn) for fqn in self._layers}
        self._next, self._previous = self._neighbours()
        self._ranks, self._device = ranks, device
        self._reductions = Reductions()
        self._group_of = {id(p): group for group in self._all for p in group.parameters.values()}
        self._trained: dict[str, bool] | None = None
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._rounds: GatherRounds | None = None
        self._rank_local_rounds: GatherRounds | None = None  # of code outside steps
        self._evaluates_in_rounds = self._settles_forwards = False
        self._is_evaluating, self._same_microbatches, self._is_full_step = False, True, False
        self.running_layers: set[str] = set()
        self.writes = ReplicaWrites(self._all, agreements)
        self._saved_views: dict[frozenset[str], SavedViews] = {}
        self._read_before_backward: set[str] = set()  # FQNs of layers with hooks that run before their first node
        self._in_backward: set[str] = set()  # FQNs of layers that are full since a backward reached them

    def gather_on_read(self, guards: ReadGuards) -> None:
        """Gather parameters for code outside layers, whose reads are unrecorded. Args: guards: of the run."""
        gather = GatherCallbacks(guards, self._read)
        for group in self._all:
            group.guard_reads(gather)

    @property
    def groups(self) -> Sequence[ParameterGroup]:
        """Groups of parameters, each with the messages in which its gradients are reduced."""
        return self._all

    def step_in_backward(self, step: Callable[[AbstractContextManager[list[nn.Parameter]]], None]) -> None:
        """Call ``step`` with the shards of each group of one stage once averages are in them, also in the backward."""
        for stage, members in self._groups.items():
            for group in members if stage is not None else ():  # the others are summed over stages
                group.call_on_averages(lambda group: step(group.reduced_shards()))

    def gather_in_rounds(self, mesh: Mesh, *, in_evaluation: bool) -> None:
        """Let ranks call layers in different orders, by ``GatherRounds``, also in an evaluation where that may be."""
        self._evaluates_in_rounds = in_evaluation
        self._rounds = GatherRounds(mesh, self._all, self._reductions)

    @property
    def _by_layer(self) -> bool:
        return self.per_layer and self._same_microbatches and not (self._is_evaluating or self._is_full_step)

    def settle(self) -> None:
        """Join the gathers of ranks that still call layers, as this one does not; collective."""
        if self._rounds is not None and self._by_layer:
            self._rounds.finish()

    def allow_rank_local_reads(self, mesh: Mesh) -> None:
        """Let code outside steps read parameters on some ranks only, from now on; collective over the world."""
        self._rank_local_rounds = (
            self._rank_local_rounds or self._rounds or GatherRounds(mesh, self._all, self._reductions)
        )

    def gather_for_this_rank(self, parameter: Tensor) -> None:
        """Gather a parameter to its full shape until `free_rank_local_reads`, in which the other ranks join."""
        group = self._group_of[id(parameter)]
        if self._is_evaluating:
            group.gather()
        elif not group.is_full:
            assert self._rank_local_rounds is not None
            self._rank_local_rounds.request([group], ())

    def free_rank_local_reads(self) -> None:
        """Free what `gather_for_this_rank` has gathered; collective unless an evaluation keeps all parameters full."""
        if self._rank_local_rounds is not None and not self._is_evaluating:
            self._rank_local_rounds.finish()
        for group in self._all:
            if group.is_full:
                group.reshard()

    @torch.compiler.disable  # a user's compiler may trace the code around a layer, but not what is sent for it
    def _gather(self, groups: Sequence[ParameterGroup], prefetched: Sequence[ParameterGroup] = ()) -> None:
        """Gather groups, by rounds if ranks may call different layers."""
        if self._rounds is not None and self._by_layer:
            self._rounds.request(groups, prefetched)
        for group in groups:
            group.gather()
        for group in prefetched if self._rounds is None else ():
            group.launch_gather()

    def _read(self, parameter: nn.Parameter) -> Tensor:
        group = self._group_of[id(parameter)]
        self._gather([group])
        group.gather_until_step_end()
        return parameter

    def check(self) -> None:
        """Check that the files of parameters can be read."""
        for file in {group.region.file for group in self._all if group.region is not None}:
            file.check()

    @property
    def regions(self) -> dict[int, Region]:
        """Regions of files that hold parameters between steps, by the id of the parameter."""
        return {id(p): group.region for group in self._all for p in group.parameters.values() if group.region}

    @property
    def freed(self) -> frozenset[str]:
        """FQNs of layers whose parameters are freed between their forward and their backward."""
        layers = self._layers.items() if self.per_layer else ()
        return frozenset(fqn for fqn, groups in layers if not all(group.keeps_full for group in groups))

    # -- a step --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, num_microbatches: int = 0) -> Iterator[None]:
        """Run a step inside; collective over the ranks of the shard, unless an evaluation keeps all parameters full.

        A step without a backward has no microbatches. Where other ranks have more or fewer, all layers are gathered for
        the whole step.
        """
        with self.writes.compared():
            self.check()
            if self._rounds is not None:
                self._rounds.forecast.begin_step()
            if num_microbatches:
                self._agree(num_microbatches)
            if not self._is_evaluating:
                for group in self._all:
                    group.move_to_storage()
                # Also under the second policy, groups of more than one layer are gathered for the whole step.
                for group in self._outside if self._by_layer else self._all:
                    group.launch_gather()
            for group in self._all if self._is_evaluating else self._outside:
                group.gather()
            for group in self._all:
                group.gather_on_read()
            try:
                yield
                if num_microbatches:
                    self.settle()
                    self._finish()
            finally:
                self._reductions.reset()
                if self._rounds is not None:
                    self._rounds.end_step()
                self._same_microbatches = True
                self._in_backward.clear()
                for group in self._all:
                    group.reshard()

    @contextlib.contextmanager
    def user_step(self, are_averaged: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Keep parameters and gradients full inside, for a step that calls backwards and optimizers itself; collective.

        It may read and write them between any two of its lines. Gradients that are no averages over replicas when it
        ends are different on each replica, so no rank has only a shard of its own until they are averaged.
        """
        with self.writes.compared(are_averaged, is_user_step=True):
            self.check()
            for group in self._all:
                group.launch_gather()
            for group in self._all:
                group.gather()
                group.gather_gradients()
            self.writes.after_shards()
            self._is_full_step = True
            try:
                yield
                self.writes.before_shards()
            finally:
                self._is_full_step = False
                for group in self._all:
                    if are_averaged():
                        group.shard_gradients()
                    group.reshard()

    def _agree(self, num_microbatches: int) -> None:
        """Agree with the ranks of the shard on the messages of a step."""
        trained = {name: p.requires_grad for group in self._all for name, p in group.parameters.items()}
        accumulated = [(group, name) for group in self._all for name, p in group.parameters.items() if p.requires_grad]
        hooked = [
            g.parameters[name].grad is not None and _has_hooks_after(g.parameters[name]) for g, name in accumulated
        ]
        self._same_microbatches, any_hooks = agree_on_step(
            trained, self._ranks, self._device, num_microbatches, has_hooks=any(hooked)
        )
        if any_hooks:
            votes = torch.tensor(hooked, dtype=torch.int32, device=self._device)
            for ranks in (self._ranks.shard, self._ranks.replicate):
                dist.all_reduce(votes, dist.ReduceOp.MAX, group=ranks)
            for (group, name), is_hooked in zip(accumulated, votes.tolist(), strict=True):
                if is_hooked:
                    group.gather_accumulated(name)
        if trained == self._trained:
            return
        self._trained = trained
        for group in self._all:
            group.train([name for name, p in group.parameters.items() if p.requires_grad])
            for name in group.trained:
                parameter = group.parameters[name]
                if id(parameter) not in self._hooks:
                    hook = GradientHook(self._on_gradient, lambda: self._reductions.is_idle)
                    self._hooks[id(parameter)] = hook.register(parameter)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def before_backward(self, stage: int, is_last: bool) -> None:
        """Begin a backward of a stage of this rank; the last one completes the gradients of the step."""
        if is_last:
            for group in self._groups.get(stage, []):
                group.show_accumulated()
        if is_last or self._by_layer:
            self._reductions.begin(list(reversed(self._groups.get(stage, []))))
        if self._rounds is not None and self._by_layer:
            self._rounds.begin_backward()

    def _on_gradient(self, parameter: Tensor) -> None:
        self._reductions.add(self._group_of[id(parameter)], parameter)

    def after_backward(self, stage: int, is_last: bool) -> None:
        """End a backward: reduce the remaining gradients, and wait for the averages."""
        if not is_last and not self._by_layer:
            return
        self.settle()
        self._reductions.launch_rest()
        finish_reductions(self._groups.get(stage, []))
        if self._by_layer:
            self._in_backward.clear()
            for group in itertools.chain(*self._layers.values()):
                group.free()

    def _finish(self) -> None:
        """Reduce gradients that are complete only now: of parameters that several stages share."""
        late = self._groups.get(None, [])
        for group in reversed(late):
            group.launch_reduce()
        finish_reductions(late)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def begin_evaluation(self, is_even: bool) -> None:
        """Keep parameters full from now on: replicas with other numbers of batches must not wait for each other.

        Where they have as many (``is_even``), layers may be gathered one by one, as in training.
        """
        self.check()
        self._settles_forwards = is_even and self._by_layer and self._evaluates_in_rounds
        if self._settles_forwards:
            return
        for group, following in itertools.pairwise([*self._all, *self._all[-1:]]):
            following.launch_gather()
            group.pin()
        self._is_evaluating = True

    def end_evaluation(self) -> None:
        """Free the full parameters."""
        self._settles_forwards = False
        if self._is_evaluating:
            self._is_evaluating = False
            for group in self._all:
                group.unpin()

    # -- layers --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, gather the parameters of each layer before its forward."""
        with replaced_forwards(self._modules, self._gathering_forward, reason="gathers parameters of layers"):
            yield
        if self._settles_forwards:  # no backward does
            self.settle()

    def _neighbours(self) -> tuple[dict[str, list[ParameterGroup]], dict[str, list[ParameterGroup]]]:
        """The groups of the layers after and before each layer, in the same stage."""
        after: dict[str, list[ParameterGroup]] = {}
        before: dict[str, list[ParameterGroup]] = {}
        for members in self._groups.values():
            fqns = list(dict.fromkeys(group.fqn for group in members if group.fqn))
            for first, second in itertools.pairwise(fqns):
                after[first], before[second] = self._layers[second], self._layers[first]
        return after, before

    def _begin_layer_backward(self, fqn: str) -> None:
        """Gather a layer that a backward has reached, and start to gather the next one."""
        if self._by_layer:
            self._leave_for(fqn)
            self._in_backward.add(fqn)
        if not all(group.is_full for group in self._layers[fqn]):
            self._gather(self._layers[fqn], self._previous.get(fqn, ()) if self._by_layer else ())
            self._read_ahead(fqn, self._previous)

    @torch.compiler.disable
    def _leave_for(self, fqn: str) -> None:
        """Free the layers whose backward is over, since code goes on with another one: [Note: full in its backward]."""
        left = self._in_backward - {fqn} - self.running_layers
        self._in_backward -= left
        for group in itertools.chain.from_iterable(self._layers[other] for other in left):
            group.free()

    def _read_ahead(self, fqn: str, following: Mapping[str, Sequence[ParameterGroup]]) -> None:
        """Begin to read the layer after the next one, if it is in a file."""
        for group in following.get(fqn, []):
            for other in following.get(group.fqn, []):
                other.read_ahead()

    def _gathering_forward(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        saved = self.saved_views([fqn])
        if self._modules[fqn]._backward_pre_hooks:
            self._read_before_backward.add(fqn)

        def run(*args: Any, **kwargs: Any) -> Any:
            if fqn in self.running_layers:
                return forward(*args, **kwargs)
            with self.inside(fqn) as returned:
                if torch._C._are_functorch_transforms_active():  # which save tensors without hooks
                    for group in self._layers[fqn]:
                        group.gather_until_step_end()
                with saved.of_layer():
                    return returned(forward(*args, **kwargs))

        return run

    @contextlib.contextmanager
    def inside(self, fqn: str) -> Iterator[Callable[[Any], Any]]:
        """Gather a layer inside, while its forward runs.

        Yields:
            A function that takes the layer's output, and returns it: a backward that reaches it gathers the layer.
        """
        groups, frees = self._layers[fqn], self._by_layer
        is_in_backward = torch._C._current_graph_task_id() != -1  # a forward that runs again
        following = self._previous if is_in_backward else self._next
        if frees and not is_in_backward:  # else the backward is still in the layers that it has reached
            self._leave_for(fqn)
        self._gather(groups, following.get(fqn, ()) if frees else ())
        for group in groups if fqn in self._read_before_backward else ():
            group.gather_until_step_end()
        self.running_layers.add(fqn)
        first_node = torch._C._autograd._get_sequence_nr()
        try:
            if frees:
                self._read_ahead(fqn, following)
            yield partial(self._gather_in_backward, fqn, first_node) if frees else _unchanged
        finally:
            self.running_layers.discard(fqn)
            for group in groups if frees and not is_in_backward else ():
                group.free()

    @contextlib.contextmanager
    def gathered(self, module: nn.Module) -> Iterator[None]:
        """Gather a module for code that uses its parameters, and saves them for a backward, outside of its forward.

        Where ranks gather layer by layer, the context is collective, as a forward of the layer is.
        """
        # The groups without a layer are gathered for the whole step.
        fqns = dict.fromkeys(self._group_of[id(p)].fqn for p in module.parameters() if id(p) in self._group_of)
        missing = [fqn for fqn in fqns if fqn and fqn not in self.running_layers]
        with contextlib.ExitStack() as stack:
            for fqn in missing:
                stack.enter_context(self.inside(fqn))
            stack.enter_context(self.saved_views(missing).of_layer())
            yield

    def _gather_in_backward(self, fqn: str, first_node: int, output: Any) -> Any:
        """Let a backward that reaches an output of a layer gather the layer; its nodes begin with this number."""
        layer = self._modules[fqn]
        reads_none = type(layer) is nn.Embedding and not (layer._backward_hooks or self._are_hooked(fqn))
        with torch._C.DisableTorchFunction():
            for tensor in tensors_inside(output):
                if id(tensor) in self._group_of:  # other code reads it
                    self._group_of[id(tensor)].gather_until_step_end()
                elif tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= first_node and not reads_none:
                    of_user = list(tensor._backward_hooks or ())  # may read parameters, so they go after this one
                    tensor.register_hook(lambda _: self._begin_layer_backward(fqn))
                    hooks: Any = tensor._backward_hooks
                    for key in of_user:
                        hooks[key] = hooks.pop(key)
        return output

    def _are_hooked(self, fqn: str) -> bool:
        """Whether hooks of the user, which may read parameters, get the gradients of this layer's."""
        with torch._C.DisableTorchFunction():
            for parameter in itertools.chain(*(group.parameters.values() for group in self._layers[fqn])):
                if parameter._backward_hooks or _has_hooks_after(parameter):
                    return True
        return False

    def saved_views(self, fqns: Collection[str]) -> SavedViews:
        """What layers save for a backward, where their parameters are freed between forward and backward."""
        key = frozenset(fqns)
        if key not in self._saved_views:
            freed = [group for fqn in fqns for group in self._layers[fqn] if not group.keeps_full]
            self._saved_views[key] = SavedViews(freed, self._full_view, lambda: self._by_layer)
        return self._saved_views[key]

    def _full_view(self, view: ParameterView) -> Tensor:
        if not view.group.is_full:
            self._begin_layer_backward(view.group.fqn)
        return view.group.full_parameter(view.name).as_strided(view.size, view.stride, view.offset)

    def close(self) -> None:
        """Remove the hooks; fills parameters with NaN if their file was truncated."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        for group in self._all:
            group.invalidate_lost()


def _has_hooks_after(parameter: Tensor) -> bool:
    """Whether hooks of the user run after the gradient of a parameter is accumulated."""
    with torch._C.DisableTorchFunction():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return not all(isinstance(hook, GradientHook) for hook in hooks.values())


def _unchanged(output: Any) -> Any:
    return output
