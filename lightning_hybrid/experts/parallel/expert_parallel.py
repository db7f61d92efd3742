"""The modules of one rank whose experts are shared: how they are cut, and how they run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.experts.parallel.all_to_all import RanksOfExperts
from lightning_hybrid.experts.parallel.expert_adapters import ExpertsAdapter
from lightning_hybrid.mesh import where_sent
from lightning_hybrid.parts.gather_on_read import Gather, Guards, OutsideLayers
from lightning_hybrid.parts.local_shards import AxisCut, HeldParts
from lightning_hybrid.parts.placement import Shard
from lightning_hybrid.parts.shard_boxes import part_of
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness, replaced_forwards
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.recording import StepError


def placements_of(
    root: nn.Module, adapters: Mapping[str, ExpertsAdapter], size: int, cuts: Sequence[AxisCut] = ()
) -> dict[str, Shard]:
    """Where the parts of the experts lie, by FQN of the parameter in the root.

    Args:
        root: The user's module, whole.
        adapters: By FQN of the module with experts.
        size: Number of ranks.
        cuts: What is cut before.
    """
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    found = {}
    for fqn, adapter in adapters.items():
        module = root.get_submodule(fqn)
        for name, placement in adapter.placements(module, size).items():
            parameter = module.get_parameter(name)
            fqn_of = names[id(parameter)]
            if placement.is_owned:  # all that is left
                owner = placement.pieces[0].owner
                placement = Shard.owned(part_of(cuts, fqn_of, parameter.shape).shape[0], size, owner or 0)
            found[fqn_of] = placement
    return found


class ContextRows(Protocol):
    """Context ranks that share experts, whose layers see rows of their own positions, or all of them the same rows."""

    def see_own(self, names: Iterable[str]) -> bool:
        """Whether what uses these parameters in the forward under way sees the positions of this rank alone."""

    def range_of(self, number: int) -> tuple[int, int]:
        """First and end of this rank's share of so many rows."""

    def share(self, rows: Tensor) -> Tensor:
        """This rank's share of rows that all have; the gradient comes from all."""

    def joined(self, share: Tensor, number: int) -> Tensor:
        """So many rows, of which each rank has its share."""


class RanksOfExpertsDiffer(RuntimeError):
    """Ranks that share experts are about to run their layers a different number of times."""


class SharedExperts:
    """The modules with experts of one rank.

    Attributes:
        adapters: By FQN.
        cut: What this rank holds of each parameter.
        ranks: That share the experts.
    """

    def __init__(
        self,
        root: nn.Module,
        adapters: Mapping[str, ExpertsAdapter],
        cut: AxisCut,
        *,
        chunks: int,
        randomness: KeyedRandomness,
        guards: Guards,
        context: ContextRows | None = None,
    ) -> None:
        """Before the parameters are cut.

        Args:
            root: The user's module.
            adapters: By FQN.
            cut: What this rank holds of each parameter.
            chunks: Of the experts of each rank, whose messages overlap with computation.
            randomness: Keys what modules draw.
            guards: Of the run.
            context: The context ranks, if there are several.
        """
        self._context = context
        self._outside = OutsideLayers("experts", Gather(guards, self._refuse))
        self.adapters, self.cut = dict(adapters), cut
        self.ranks = RanksOfExperts(cut.group, chunks=chunks)
        self._root = root
        self._modules: dict[str, nn.Module] = {}
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}  # that are cut, by module and their own FQN
        self._wholes: dict[str, dict[nn.Parameter, Tensor]] | None = None
        for adapter in self.adapters.values():
            adapter.again = randomness.again

    @property
    def not_gathered_by_layer(self) -> frozenset[str]:
        """FQNs of parameters that not all ranks use as often: nobody may wait for others when a layer runs."""
        lists = {fqn for fqn, adapter in self.adapters.items() if adapter.may_skip}
        return frozenset(name for name in self.cut.placements if any(name.startswith(f"{fqn}.") for fqn in lists))

    def be_ready(self) -> None:
        """Be ready to run, now that each parameter holds this rank's part."""
        names = {id(parameter): name for name, parameter in self._root.named_parameters()}
        for fqn in self.adapters:
            module = self._root.get_submodule(fqn)
            mine = {names[id(p)]: p for p in module.parameters() if names[id(p)] in self.cut.placements}
            if not any(map(is_absent, mine.values())):
                self._modules[fqn], self._parameters[fqn] = module, mine

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The modules run with shared experts inside; in evaluation, code around them finds all experts."""
        cut = [parameter for mine in self._parameters.values() for parameter in mine.values()]
        around = self._outside.on(cut) if self._wholes is None else self.all_held()
        with around, replaced_forwards(self._modules, lambda fqn, forward: partial(self._run, fqn, forward)):
            yield

    def _refuse(self, parameter: nn.Parameter) -> Tensor:
        """Other ranks may be at another line, and would not answer a gather of their experts.

        Raises:
            StepError: Always.
        """
        named = [(name, p) for mine in self._parameters.values() for name, p in mine.items()]
        name = next(name for name, p in named if p is parameter)
        raise StepError(
            f"the training step reads '{name}' outside of its layer, but {self.cut.group.size()} ranks share these"
            f" experts, and this one holds {tuple(parameter.shape)} of it; read it in a hook such as on_train_batch_end"
            " or in validation, or set expert_parallel_size=1"
        )

    def _run(self, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._wholes is not None:
            with _holding(self._wholes[fqn]):
                return forward(*args, **kwargs)
        with self._outside.inside(self._parameters[fqn].values()):
            return self._exchanged(fqn, forward, args, kwargs)

    def _exchanged(self, fqn: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        module, adapter = self._modules[fqn], self.adapters[fqn]
        trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())

        def exchange(rows: Tensor, counts: Tensor) -> Tensor:
            trains = trained or (torch.is_grad_enabled() and rows.requires_grad)
            return self.ranks.run(rows, counts, partial(adapter.compute, module, forward), trains=trains)

        def exchange_share(rows: Tensor, counts: Tensor) -> Tensor:
            """Context ranks have the same rows: each row is to be computed, and to give a gradient, once."""
            assert self._context is not None
            number = int(counts.sum())
            first, end = self._context.range_of(number)
            ends = counts.cumsum(0)
            mine = (ends.clamp(max=end) - (ends - counts).clamp(min=first)).clamp(min=0)
            return self._context.joined(exchange(self._context.share(rows[:number]), mine), number)

        if self._context is None or self._context.see_own(self._parameters[fqn]):
            return adapter.run(module, forward, args, kwargs, exchange)
        return adapter.run(module, forward, args, kwargs, exchange_share)

    # -- a step --------------------------------------------------------------------------------------------------------

    def meet(self, num_microbatches: int) -> None:
        """See that all ranks are about to run the layers as often; collective over the ranks that share experts.

        Args:
            num_microbatches: Of the step on this rank.

        Raises:
            RanksOfExpertsDiffer: They are not; on every rank.
        """
        votes = where_sent(torch.tensor([num_microbatches, -num_microbatches]), self.cut.group)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.cut.group)
        most, fewest = votes[0].item(), -votes[1].item()
        if most != fewest:
            raise RanksOfExpertsDiffer(
                f"replicas that share experts must run their layers equally often, but have batches of {fewest} to"
                f" {most} microbatches ({num_microbatches} here); give them batches of equal size, or set"
                " num_microbatches=1"
            )

    @torch.no_grad()
    def agree_on_gradients(self) -> None:
        """What one rank alone holds has a gradient on the others too, of no element; collective.

        So optimizers have a state for the same parameters on every rank.
        """
        owned = [p for fqn, mine in self._parameters.items() if self.adapters[fqn].may_skip for p in mine.values()]
        if not owned:
            return
        has = torch.tensor([parameter.grad is not None for parameter in owned], dtype=torch.int32)
        has = where_sent(has, self.cut.group)
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self.cut.group)
        for parameter, one_has in zip(owned, has.tolist(), strict=True):
            if one_has and parameter.grad is None and not parameter.numel():
                parameter.grad = torch.zeros_like(parameter)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def begin_evaluation(self, parts: HeldParts) -> None:
        """Hold all experts until ``end_evaluation``: replicas may have different numbers of batches; collective.

        Args:
            parts: What this rank holds of all parameters.
        """
        with torch.no_grad():
            self._wholes = {
                fqn: {p: parts.joined(name, p.detach(), over_tensor_ranks=False) for name, p in mine.items()}
                for fqn, mine in self._parameters.items()
            }

    @contextlib.contextmanager
    def all_held(self) -> Iterator[None]:
        """Inside an evaluation: also code that no layer of experts runs finds all experts."""
        with contextlib.ExitStack() as stack:
            for wholes in (self._wholes or {}).values():
                stack.enter_context(_holding(wholes))
            yield

    def end_evaluation(self) -> None:
        """Let them go."""
        self._wholes = None


@contextlib.contextmanager
def _holding(wholes: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Parameters are whole inside."""
    parts = {parameter: parameter.data for parameter in wholes}
    for parameter, whole in wholes.items():
        parameter.data = whole
    try:
        yield
    finally:
        for parameter, part in parts.items():
            parameter.data = part
