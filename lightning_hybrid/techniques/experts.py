"""Expert parallelism: the experts are found in the first recorded step, sharded over ranks, and run so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.experts.parallel.adapters import Exchange
from lightning_hybrid.experts.parallel.find import (
    ExpertCalls,
    FoundExperts,
    by_reason,
    describe_experts,
    has_stacked_experts,
)
from lightning_hybrid.experts.parallel.sharded import ContextRows, ShardedExperts, placements_of
from lightning_hybrid.experts.parallel.width import (
    TensorShardedExperts,
    WidthSharding,
    width_placements,
)
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.guards import ReadGuards
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.shards import AxisSharding
from lightning_hybrid.patching import replaced_forwards
from lightning_hybrid.pipeline.stages.plan import TraceVariant
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.sequence.positions import SequenceSharding, gather_sequence, shard_sequence
from lightning_hybrid.strategies.options.options import Options, compile_options
from lightning_hybrid.techniques.technique import Active, Technique
from lightning_hybrid.techniques.tensor_plans import check_is_sharded
from lightning_hybrid.tensor.collectives import GroupRanks
from lightning_hybrid.tensor.runtime.model import ShardedModel


class ExpertParallel(Technique):
    """Ranks share the experts of a layer, or the width of each; they are found while the first step is recorded.

    Attributes:
        summary: The experts found, for the start table.
        shared: The experts sharded over ranks, if they are.
        widths: Shardings of experts over tensor ranks, by FQN of the module.
    """

    records = True
    shares_layers = True

    def __init__(
        self, module: nn.Module, mesh: Mesh, options: Options, randomness: KeyedRandomness, guards: ReadGuards
    ) -> None:
        self._module, self._mesh, self._randomness, self._guards = module, mesh, randomness, guards
        self._chunks, self._compile = options.expert_chunks, compile_options(options.compile)
        self._uncompiled: Collection[str] = ()
        self._size = mesh.layout.expert_parallel_size
        self._calls = ExpertCalls()
        self._drawing: Collection[str] = ()
        self._widths: TensorShardedExperts | None = None
        self.widths: Mapping[str, WidthSharding] = {}
        self.shared: ShardedExperts | None = None
        self.summary = ""

    @classmethod
    def of(cls, run: Any) -> list[ExpertParallel]:
        """Return it if ranks may share experts."""
        setting = run.setting
        module, size = setting.module, setting.layout.expert_parallel_size
        # Tensor ranks may hold shards instead; a stack has three dimensions.
        may_be_stacked = any(parameter.dim() > 2 for parameter in module.parameters())
        if size == 1 and not (may_be_stacked and has_stacked_experts(module)):
            return []
        return [cls(module, setting.world.mesh, setting.options, run.randomness, run.runner.guards)]

    @contextmanager
    def watching(self, variant: TraceVariant) -> Iterator[None]:
        """Observe the modules while the step is recorded inside."""
        with self._calls.watching(variant.recording.units):
            yield
        self._drawing = variant.recording.graph.draws

    def place(self, run: Any, earlier: Sequence[AxisSharding]) -> Sequence[AxisSharding]:
        """Find the experts on the first rank, and shard them; collective over the world; return the further shardings.

        Raises:
            LayoutError: There are no experts that can be sharded, or nothing is sharded over tensor ranks; on every
                rank.
            RuntimeError: The search failed; on every rank.
        """
        size, tensor_size, shards = self._size, self._mesh.size("tp"), run.shards
        box: list[Any] = [None]
        if self._mesh.rank == 0:
            try:
                with torch.random.fork_rng(devices=[]):
                    box[0] = self._calls.find(self._module, size, tensor_size, partial(self._why_not_shardable, shards))
            except Exception as error:
                box[0] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(box, src=0)
        experts = box[0]
        if not isinstance(experts, FoundExperts):
            raise RuntimeError(f"no experts were found for expert_parallel_size={size}: {experts}")
        if size > 1 and not experts.adapters:
            reasons = "; ".join(f"{fqns}: {reason}" for fqns, reason in by_reason(experts.replicated))
            numbers = "a size that divides the number of experts, or " if experts.replicated else ""
            raise LayoutError(
                f"expert_parallel_size={size} finds no experts that {size} ranks can share"
                f" ({reasons or 'no module has stacked experts or a list of them that its tokens choose from'});"
                f" set {numbers}expert_parallel_size=1, or register an adapter with"
                " lightning_hybrid.experts.register_experts",
                entry="no-experts",
            )
        self._calls = ExpertCalls()
        new_shardings = []
        if experts.widths:
            assert shards is not None
            widths = width_placements(self._module, experts.widths)
            shards.mark_sharded_elsewhere(widths)
            self._over_width = AxisSharding(self._mesh.group("tp"), widths, axis="tp")
            new_shardings.append(self._over_width)
            ranks = GroupRanks(self._mesh.group("tp"))
            self.widths, self._widths = experts.widths, TensorShardedExperts(self._module, experts.widths, ranks)
        elif tensor_size > 1 and shards is not None:
            check_is_sharded(shards.plans, tensor_size)
        if size > 1:
            new_shardings.append(self._share(experts, [*earlier, *new_shardings], shards))
        self.summary = describe_experts(experts, size, tensor_size)
        if self._compile is not None and (experts.adapters or experts.widths):
            _check_graphs(self._compile)
            self._uncompiled = experts.adapters.keys() | experts.widths.keys()
        return new_shardings

    def _share(
        self, found: FoundExperts, shardings: Sequence[AxisSharding], shards: ShardedModel | None
    ) -> AxisSharding:
        placements = placements_of(self._module, found.adapters, self._size, shardings)
        sharding = AxisSharding(self._mesh.group("ep"), placements, axis="ep", places=self._mesh.places("ep"))
        context = ContextRows()
        if shards is not None:
            self._check_has_no_numbers(placements)
        if shards is not None and self._mesh.size("cp") > 1:
            shards.set_sharded_over_context(placements)
            context = _ReplicatedRows(self._mesh.group("cp"), shards)
        self.shared = ShardedExperts(
            self._module,
            found.adapters,
            sharding,
            chunks=self._chunks,
            replica_share=self._mesh.size("ep_replicate") / self._mesh.size("data"),
            randomness=self._randomness,
            guards=self._guards,
            context=context,
        )
        return sharding

    def _check_has_no_numbers(self, placements: Collection[str]) -> None:
        """Raise an error if an expert of a list has a number, which no rank shards and only the expert's rank uses."""
        for fqn, module in self._module.named_modules():
            named = {f"{fqn}.{name}": parameter for name, parameter in module.named_parameters()}
            numbers = [name for name, parameter in named.items() if not parameter.dim()]
            if numbers and {*placements} & named.keys() and named.keys() <= {*placements, *numbers}:
                raise LayoutError(
                    f"expert_parallel_size={self._size} finds no experts that {self._size} ranks can share:"
                    f" '{numbers[0]}' is a single number, whose gradients on tensor or context ranks are not added up;"
                    " make it a vector of one element, or set expert_parallel_size=1",
                    entry="no-experts",
                )

    def _why_not_shardable(self, shards: ShardedModel | None, fqn: str) -> str:
        """Return why surrounding code keeps the experts of a module from being sharded; "" if it does not."""
        if any(name == fqn or name.startswith(f"{fqn}.") for name in self._drawing):
            return "they draw random numbers, which ranks would draw equally for different features"
        names = [f"{fqn}.{name}" for name, _ in self._module.get_submodule(fqn).named_parameters()]
        return "" if shards is None else next(filter(None, map(shards.why_not_sharded_elsewhere, names)), "")

    def build(self, run: Any, owner: Any) -> Active:
        """Collect the experts of this rank."""
        modules = {fqn: self._module.get_submodule(fqn) for fqn in self._uncompiled}
        meet = partial(run.setting.world.rendezvous, compares=False)
        if self._widths is not None:
            ranks = HookAgreement(run.mesh.group("tp"), run.setting.device, meet, "tensor")
            self._widths.gather_on_read(self._over_width, self._guards, ranks, run.names_over("ep"))
        if self.shared is None:
            return _Experts(self._widths, modules)
        self.shared.be_ready()
        if run.plain_runner is not None:
            agreement = HookAgreement(run.mesh.group("holders"), run.setting.device, meet, "layer's")
            self.shared.gather_gradients(run.parts, agreement)
        return _SharedExperts(self.shared, run.parts, self._widths, modules)

    def inseparable(self) -> Collection[nn.Module]:
        """Lists of experts, whose ranks share them: they belong to the layer that routes tokens to them."""
        return [] if self.shared is None else self.shared.lists()

    def unequally_read(self) -> Collection[str]:
        """Parameters of a list of experts, which some ranks have no tokens for."""
        return () if self.shared is None else self.shared.not_gathered_by_layer

    def lines(self, run: Any) -> list[str]:
        """Return which experts are sharded over which ranks."""
        return [self.summary] if self.summary else []


class _Experts(Active):
    """The experts of this rank, while they run."""

    def __init__(self, widths: TensorShardedExperts | None, uncompiled: Mapping[str, nn.Module]) -> None:
        self._widths, self._uncompiled = widths, uncompiled
        self._eager = {fqn: _EagerForward() for fqn in uncompiled}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run modules with sharded experts inside."""
        with ExitStack() as stack:
            if self._widths is not None:
                stack.enter_context(self._widths.local_widths())
            stack.enter_context(self.exchanging())
            if self._widths is not None:
                stack.enter_context(self._widths.running())
            run = replaced_forwards(
                self._uncompiled, lambda fqn, run: self._eager[fqn].around(run), reason="expert parallelism"
            )
            stack.enter_context(run)
            yield

    def exchanging(self) -> AbstractContextManager[None]:
        """Exchange rows between ranks that share experts."""
        return nullcontext()


class _SharedExperts(_Experts):
    """The experts that ranks share.

    What experts exchange in the middle of a step cannot be brought to its end without it, so no step is rolled back.
    """

    can_roll_back = False
    guards_loaders = False

    def __init__(self, shared: ShardedExperts, parts: Any, *others: Any) -> None:
        super().__init__(*others)
        self._shared, self._parts = shared, parts

    def step(self, num_microbatches: int = 0) -> AbstractContextManager[None]:
        """Check that replicas run their layers equally often."""
        if num_microbatches:
            self._shared.check_equal_microbatches(num_microbatches)
        return nullcontext()

    def exchanging(self) -> AbstractContextManager[None]:
        """Exchange rows between ranks that share experts."""
        return self._shared.running()

    def complete_gradients(self) -> None:
        """Give a parameter that one rank owns an empty gradient on the others, if it has one there."""
        self._shared.agree_on_gradients()

    def unpartitioned(self) -> AbstractContextManager[None]:
        """Use full experts in an evaluation, also in code outside of their layers."""
        return self._shared.full_experts()

    def end_evaluation(self) -> None:
        """Free the gathered experts."""
        self._shared.end_evaluation()

    def begin_evaluation(self, is_even: bool) -> None:
        """Gather the experts: replicas may have unequally many batches."""
        self._shared.begin_evaluation(self._parts)


def _check_graphs(options: Mapping[str, Any]) -> None:
    if options.get("fullgraph"):
        raise ValueError(
            f"compile={dict(options)} compiles each layer to one graph, but experts that are sharded over ranks run"
            " between two graphs; leave fullgraph out"
        )


class _EagerForward:
    """A forward that a compiled layer calls uncompiled: it asks other ranks how many rows they send."""

    def __init__(self) -> None:
        self._forward: Callable[..., Any] | None = None
        self._call = torch.compiler.disable(self._forward_of_now)  # one object, by which compiled layers know it again

    def _forward_of_now(self, *args: Any, **kwargs: Any) -> Any:
        assert self._forward is not None
        return self._forward(*args, **kwargs)

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        self._forward = forward
        return self._call


class _ReplicatedRows(ContextRows):
    """Context ranks, whose layers see the rows of local positions, or rows that all of them have."""

    def __init__(self, group: dist.ProcessGroup, shards: ShardedModel) -> None:
        self._ranks, self._shards = GroupRanks(group), shards

    def exchange_of(self, names: Collection[str], exchange: Exchange) -> Exchange:
        """Exchange a share of rows that all context ranks have: each row is computed only once."""
        if any(map(self._shards.sees_local_positions, names)):
            return exchange

        def exchange_share(rows: Tensor, counts: Tensor) -> Tensor:
            """Of shape [P, D] -> [P, D']; counts [E]."""
            number, ends = int(counts.sum()), counts.cumsum(0)
            sharding = SequenceSharding(0, number, self._ranks)
            first = sum(sharding.lengths[: self._ranks.rank])
            end = first + sharding.lengths[self._ranks.rank]
            local_counts = (ends.clamp(max=end) - (ends - counts).clamp(min=first)).clamp(min=0)
            return gather_sequence(exchange(shard_sequence(rows[:number], sharding), local_counts), sharding)

        return exchange_share
