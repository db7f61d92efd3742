"""Expert parallelism of one rank: runs modules whose experts are sharded, in training and evaluation.

A rank's experts compute the rows of several replicas. All other gradients are those of one replica, to be averaged, so
the gradients of experts are made such while they are computed: by a factor, the share of one replica among them, where
the experts use their parameters. So second derivatives have it too, and whatever sums, averages, accumulates, clips or
reads gradients needs to know nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.tensors import on_group_device
from lightning_hybrid.errors import StepError, UnequalMicrobatches, UnsupportedExpertCalls
from lightning_hybrid.experts.parallel.adapters import Exchange, ExpertsAdapter
from lightning_hybrid.experts.parallel.all_to_all import ExpertAllToAll
from lightning_hybrid.params import store
from lightning_hybrid.params.boxes import shard_of
from lightning_hybrid.params.guards import GatherCallbacks, OutsideLayerGuard, ReadGuards, below_read_guards
from lightning_hybrid.params.placement import Shard
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.reads.gradients import FullGradients, agree_on_presence
from lightning_hybrid.params.shards import AxisSharding, LocalShards
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.standins.tensors import is_absent


def placements_of(
    root: nn.Module, adapters: Mapping[str, ExpertsAdapter], size: int, shardings: Sequence[AxisSharding] = ()
) -> dict[str, Shard]:
    """Returns how the full parameters of experts are sharded, by FQN in the root, after other shardings."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    placements = {}
    for fqn, adapter in adapters.items():
        module = root.get_submodule(fqn)
        for name, placement in adapter.placements(module, size).items():
            parameter = module.get_parameter(name)
            fqn_of = names[id(parameter)]
            if placement.is_owned:  # one rank has all that the other shardings leave
                owner = placement.pieces[0].owner
                placement = Shard.owned(shard_of(shardings, fqn_of, parameter.shape).shape[0], size, owner or 0)
            placements[fqn_of] = placement
    return placements


class ContextRows:
    """Which rows a rank sends to experts; without context ranks, those that its layer computes."""

    def exchange_of(self, names: Collection[str], exchange: Exchange) -> Exchange:
        """Returns how the module with these parameters exchanges its rows in the current forward."""
        return exchange


class ShardedExperts:
    """Runs the modules with sharded experts of one rank.

    Attributes:
        adapters: Adapters by FQN of the module.
        sharding: Sharding of the parameters over the expert-parallel ranks.
        ranks: All-to-all over the expert-parallel ranks.
    """

    def __init__(
        self,
        root: nn.Module,
        adapters: Mapping[str, ExpertsAdapter],
        sharding: AxisSharding,
        *,
        chunks: int,
        replica_share: float,
        randomness: KeyedRandomness,
        guards: ReadGuards,
        context: ContextRows,
    ) -> None:
        """Prepares the modules before their parameters are sharded.

        Messages of the ``chunks`` of each rank's experts overlap with computation. ``replica_share`` is the share of
        one replica among those whose rows the experts of a rank compute.
        """
        self._context = context
        self._guards = guards
        self._outside = OutsideLayerGuard("experts", GatherCallbacks(guards, self._refuse))
        self.adapters, self.sharding = dict(adapters), sharding
        self.ranks = ExpertAllToAll(sharding.group, chunks=chunks)
        self._root, self._replica_share = root, replica_share
        self._modules: dict[str, nn.Module] = {}
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}  # sharded ones, by module and FQN
        self._uses: dict[str, list[tuple[nn.Module, str]]] = {}  # the same, as the modules that use them, and names
        self._full: dict[str, dict[nn.Parameter, Tensor]] | None = None
        self._gradients: list[FullGradients] = []
        for adapter in self.adapters.values():
            adapter.draw_again_by(randomness.again)

    @property
    def not_gathered_by_layer(self) -> frozenset[str]:
        """FQNs of parameters that ranks use unequally often: no layer may gather them by a collective."""
        lists = {fqn for fqn, adapter in self.adapters.items() if adapter.may_skip}
        return frozenset(name for name in self.sharding.placements if any(name.startswith(f"{fqn}.") for fqn in lists))

    def lists(self) -> list[nn.Module]:
        """Returns the lists of experts, and other lists inside of the modules that route tokens to them."""
        inside = [inner for fqn in self.adapters for inner in self._root.get_submodule(fqn).modules()]
        return [inner for inner in inside if isinstance(inner, nn.ModuleList | nn.ModuleDict)]

    def be_ready(self) -> None:
        """Collects the modules of this rank, once each parameter is this rank's local shard."""
        names = {id(parameter): name for name, parameter in self._root.named_parameters()}
        for fqn in self.adapters:
            module = self._root.get_submodule(fqn)
            sharded = {names[id(p)]: p for p in module.parameters() if names[id(p)] in self.sharding.placements}
            if not any(map(is_absent, sharded.values())):
                self._modules[fqn], self._parameters[fqn] = module, sharded
                self._uses[fqn] = [
                    (inner, name)
                    for inner in module.modules()
                    for name, parameter in inner.named_parameters(recurse=False)
                    if names[id(parameter)] in sharded
                ]

    def gather_gradients(self, shards: LocalShards, agreement: HookAgreement) -> None:
        """Gather gradients when code outside of layers reads them; called after ``be_ready``."""
        named = {name: p for parameters in self._parameters.values() for name, p in parameters.items()}
        full = FullGradients(named, shards, agreement)
        gather = GatherCallbacks(self._guards, self._refuse, gradient=full.get, set_gradient=full.set)
        self._outside = OutsideLayerGuard("experts", gather)
        self._guards.before_shard_access.append(full.settle)
        self._guards.after_shard_access.append(full.refresh)
        self._gradients = [full]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs the modules with sharded experts inside; in evaluation, code outside of them sees full experts."""
        sharded = [parameter for named in self._parameters.values() for parameter in named.values()]
        around = self._outside.on(sharded) if self._full is None else self.full_experts()
        with around, replaced_forwards(self._modules, partial(partial, self._run), reason="expert parallelism"):
            try:
                yield
            finally:
                self._guards.settle()
                for gradients in self._gradients:
                    gradients.forget()

    def _refuse(self, parameter: nn.Parameter) -> Tensor:
        """Refuses a read of sharded experts outside of their layer: other ranks may not take part in a gather."""
        named = [(name, p) for parameters in self._parameters.values() for name, p in parameters.items()]
        name = next(name for name, p in named if p is parameter)
        raise StepError(
            f"the training step reads '{name}' outside of its layer, but {self.sharding.group.size()} ranks share these"
            f" experts, and this one holds {tuple(parameter.shape)} of it; read it in a hook such as on_train_batch_end"
            " or in validation, or set expert_parallel_size=1",
            entry="expert-read",
        )

    def _run(self, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._full is not None:
            with _swapped_data(self._full[fqn]):
                return forward(*args, **kwargs)
        with self._outside.inside(self._parameters[fqn].values()):
            try:
                return self._exchanged(fqn, forward, args, kwargs)
            except UnsupportedExpertCalls as error:
                raise UnsupportedExpertCalls(
                    f"{fqn}: {error}, unlike in the proof that its experts can be sharded over"
                    f" {self.sharding.group.size()} ranks; set expert_parallel_size=1",
                    entry="expert-calls",
                ) from error

    def _exchanged(self, fqn: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        module, adapter = self._modules[fqn], self.adapters[fqn]
        trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())

        def exchange(rows: Tensor, counts: Tensor) -> Tensor:
            """Of shape [P, D] -> [P, D']; counts [E]."""
            trains = trained or (torch.is_grad_enabled() and rows.requires_grad)
            return self.ranks.run(rows, counts, partial(self._compute, fqn, forward), trains=trains)

        exchanged = self._context.exchange_of(self._parameters[fqn], exchange)
        return adapter.run(module, forward, args, kwargs, exchanged)

    def _compute(
        self, fqn: str, forward: Callable[..., Any], rows: Tensor, counts: Sequence[int], first: int
    ) -> Tensor:
        """Applies the experts of this rank to rows of all ranks, [R, D] -> [R, D']."""
        with _scaled_gradients(self._uses[fqn], self._replica_share):
            out: Tensor = self.adapters[fqn].compute(self._modules[fqn], forward, rows, counts, first)
        return out

    # -- a step --------------------------------------------------------------------------------------------------------

    def check_equal_microbatches(self, num_microbatches: int) -> None:
        """Checks that all ranks have equally many microbatches; collective over the expert-parallel ranks."""
        votes = on_group_device(torch.tensor([num_microbatches, -num_microbatches]), self.sharding.group)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.sharding.group)
        most, least = votes.tolist()
        if most != (fewest := -least):
            raise UnequalMicrobatches(
                f"replicas that share experts must run their layers equally often, but their batches have {fewest} to"
                f" {most} microbatches ({num_microbatches} here); give them batches of equal size, or set"
                " num_microbatches=1",
                entry="expert-microbatches",
            )

    def agree_on_gradients(self) -> None:
        """Gives a parameter that one rank owns an empty gradient on the other ranks, if it has one there; collective.

        So optimizers have states for the same parameters on every rank.
        """
        owned = [p for fqn, named in self._parameters.items() if self.adapters[fqn].may_skip for p in named.values()]
        if owned:
            agree_on_presence(owned, self.sharding.group)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def begin_evaluation(self, parts: LocalShards) -> None:
        """All-gathers the experts until ``end_evaluation``: replicas may have unequally many batches; collective."""
        with torch.no_grad():
            self._full = {
                fqn: {p: parts.unshard(name, p.detach(), over_tensor_ranks=False) for name, p in named.items()}
                for fqn, named in self._parameters.items()
            }

    def full_experts(self) -> AbstractContextManager[None]:
        """Uses full experts inside an evaluation, also in code outside of their layers."""
        return _swapped_data({p: full for tensors in (self._full or {}).values() for p, full in tensors.items()})

    def end_evaluation(self) -> None:
        """Frees the full experts."""
        self._full = None


@contextlib.contextmanager
def _scaled_gradients(parameters: Iterable[tuple[nn.Module, str]], factor: float) -> Iterator[None]:
    """Multiplies gradients of uses inside by a factor, of parameters given as modules and names."""
    with torch._C.DisableTorchFunctionSubclass():  # tensor ranks may guard them: this is no read of user code
        before = [(inner, name, inner._parameters[name]) for inner, name in parameters]
        for inner, name, parameter in before:
            if parameter is not None and parameter.requires_grad and torch.is_grad_enabled() and factor != 1.0:
                use: Any = parameter.view_as(parameter)
                use.register_hook(lambda gradient: gradient * factor)
                inner._parameters[name] = use
    try:
        yield
    finally:
        for inner, name, parameter in before:
            inner._parameters[name] = parameter


@contextlib.contextmanager
def _swapped_data(full: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Replaces the data of parameters by the full tensors inside the context."""
    with torch._C.DisableTorchFunctionSubclass():  # tensor ranks may guard them: this is no read of user code
        local = {parameter: parameter.data for parameter in full}
    _set_data(full, store.swap_in)
    try:
        yield
    finally:
        _set_data(local, store.swap_out)


@below_read_guards
def _set_data(data: Mapping[nn.Parameter, Tensor], change: Callable[[Tensor, Tensor], None]) -> None:
    for parameter, tensor in data.items():
        change(parameter, tensor)
