"""Tensor parallelism in a strategy: plan the units while the first step is recorded, cut them, say what was found."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.layout import LayoutError
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.parts.held import HeldParts
from lightning_hybrid.parts.reads import CutReads
from lightning_hybrid.pipeline.executor import Variant
from lightning_hybrid.pipeline.global_reads import GlobalReads
from lightning_hybrid.pipeline.known import Contents
from lightning_hybrid.step.absent import is_absent
from lightning_hybrid.step.layers import find_layers
from lightning_hybrid.strategies.user_optimizers import looks_at_all
from lightning_hybrid.tensor.authority import wishes_by_unit
from lightning_hybrid.tensor.cache import PlanCache
from lightning_hybrid.tensor.find import plan_unit
from lightning_hybrid.tensor.patterns import TensorPlanError, Wish, wishes_of_model, wishes_of_user
from lightning_hybrid.tensor.plan import NOT_A_MULTIPLE, Deal, UnitPlan
from lightning_hybrid.tensor.search import plan_units
from lightning_hybrid.tensor.shards import ModelShards
from lightning_hybrid.tensor.units import Calls, seen_calls
from lightning_hybrid.tensor.vocabulary import Use, VocabularyUses
from lightning_hybrid.zero.offload import twin_of


class TensorPlanner:
    """Plans the units of one module while its first step is recorded.

    Attributes:
        summary: Where the plans came from, in words; on the first rank.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        sequence_parallel: bool,
        plan: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> None:
        """Read what is asked.

        Args:
            module: The user's, whole.
            mesh: The ranks.
            sequence_parallel: Deal positions between regions.
            plan: The user's: pattern -> style.
            folder: Where plans are kept from run to run, if they are.

        Raises:
            TensorPlanError: A pattern of the plan matches nothing; on every rank.
        """
        self._module, self._mesh = module, mesh
        self._size, self._context = mesh.size("tp"), mesh.size("cp")
        self._deal: Deal = "tensor" if sequence_parallel else None
        self._yours: dict[str, Wish] = {}
        self._own: dict[str, Wish] = {}
        if self._size > 1:  # plans say how weights are cut
            self._yours, self._own = wishes_of_user(module, plan or {}), wishes_of_model(module)
        self._folder = folder
        self.summary = ""
        self._calls = Calls()
        self._units: dict[str, nn.Module] = {}
        self._read_by_step: dict[str, str] = {}
        self._uses: dict[str, Use] = {}

    @contextlib.contextmanager
    def watching(self, variant: Variant) -> Iterator[None]:
        """See the units while the step is recorded inside."""
        units = variant.recording.units
        self._units = find_layers(units)
        for node in variant.recording.graph.nodes:
            if node.unit is None:
                self._read_by_step.update(dict.fromkeys(node.parameters, node.line))
        with seen_calls(self._units, units) as self._calls:
            uses = VocabularyUses(self._module, self._units, self._calls.running)
            with uses:
                yield
        if self._size > 1:
            self._uses = uses.uses

    def plan(self, with_experts: bool = False) -> ModelShards:
        """Find the plans on the first rank, and have them on all; collective over the world.

        Args:
            with_experts: Whether experts may be cut besides: whoever finds that out checks that something is cut.

        Raises:
            LayoutError: Nothing of the module can be cut; on every rank.
            TensorPlanError: The user's plan cannot be followed, or is not proved; on every rank.
            RuntimeError: The search failed; on every rank.
        """
        box: list[Any] = [None]
        if self._mesh.rank == 0:
            try:
                box[0] = self._planned()
            except TensorPlanError as error:
                box[0] = error
            except Exception as error:
                box[0] = f"{type(error).__name__}: {error}"
                if self._mesh.layout.world_size == 1:
                    raise
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], TensorPlanError):
            raise box[0]
        if isinstance(box[0], str):
            sizes = f"tensor_parallel_size={self._size} and context_parallel_size={self._context}"
            raise RuntimeError(f"no plan for {sizes} was found: {box[0]}")
        self._calls = Calls()
        if self._size > 1 and not with_experts:
            check_cut(box[0], self._size)
        if self._context > 1:
            _check_dealt(box[0], self._size, self._context)
        groups = self._mesh.group("tp"), self._mesh.group("cp")
        return ModelShards(self._module, box[0], *groups, self._mesh.places("cp"))

    def _planned(self) -> dict[str, UnitPlan]:
        cache = None if self._folder is None else PlanCache(self._folder)
        plans = plan_units(
            self._module,
            self._units,
            self._calls,
            self._read_by_step,
            self._size,
            plan_unit if cache is None else cache.find,
            self._deal,
            self._context,
            wishes_by_unit(self._module, self._units, self._yours, self._own),
            self._uses,
        )
        if cache is not None:
            self.summary = f"plans of layers: {cache.summary(cache.save())}"
        return plans


def _check_dealt(plans: Mapping[str, UnitPlan], size: int, context: int) -> None:
    if any(plan.positions is not None for plan in plans.values()):
        return
    reasons = "; ".join(f"{fqn}: {plan.undealt}" for fqn, plan in plans.items() if plan.undealt)
    beside, divisor = "", ""
    if size > 1:
        beside = f" beside tensor_parallel_size={size}"
        divisor = f", or sizes whose product, now {size}*{context} = {size * context}, divides the numbers of heads"
    raise LayoutError(
        f"context_parallel_size={context}{beside} deals the positions of no layer to its ranks, so {context} ranks"
        f" would do the same ({reasons or 'no layer takes a sequence'}); set context_parallel_size=1{divisor}"
    )


def check_cut(plans: Mapping[str, UnitPlan], size: int) -> None:
    """See that something is cut.

    Args:
        plans: By FQN of the unit.
        size: Number of tensor ranks.

    Raises:
        LayoutError: Nothing is; the message has the sizes that are in the way, and the modules that have them.
    """
    if any(plan.num_sharded > len(plan.vocabulary) for plan in plans.values()):
        return
    if any(plan.vocabulary for plan in plans.values()) and not any(plan.uneven for plan in plans.values()):
        return  # there is nothing but embeddings and heads that could be cut
    uneven: dict[tuple[int, str], list[str]] = {}
    others: dict[str, list[str]] = {}
    for fqn, plan in plans.items():
        for name, count in plan.uneven.items():
            uneven.setdefault(count, []).append(f"{fqn}.{name}" if name else fqn)
        for name, reason in plan.kept.items():
            if reason not in ("no weight of a linear", "added to the sum over ranks") and NOT_A_MULTIPLE not in reason:
                others.setdefault(reason, []).append(f"{fqn}.{name}")
    listed = [f"{count} {what} of {_first_and(n)} are {NOT_A_MULTIPLE} {size}" for (count, what), n in uneven.items()]
    listed += [f"{_first_and(names)}: {reason}" for reason, names in others.items()]
    advice = ""
    if uneven:
        common = math.gcd(*(count for count, _ in uneven))
        sizes = [str(divisor) for divisor in range(2, common + 1) if common % divisor == 0][:8]
        which = f" (such as {' or '.join(sizes)})" if sizes else ""
        advice = f"a size that divides the numbers of heads and the widths of the layers{which}, or "
    raise LayoutError(
        f"tensor_parallel_size={size} cuts no layer of the module, so {size} ranks would do the same"
        f" ({'; '.join(listed) or 'it has no layers that multiply by a weight'}); set {advice}tensor_parallel_size=1"
    )


def _first_and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def warn_across_nodes(size: int, ranks_per_node: int, num_nodes: int) -> None:
    """Say so if tensor ranks, which meet several times in each layer, lie on several nodes.

    Args:
        size: Number of tensor ranks; they are neighbours.
        ranks_per_node: Ranks of each node.
        num_nodes: Number of nodes.
    """
    if num_nodes == 1 or ranks_per_node % size == 0:
        return
    start = next(first for first in range(0, ranks_per_node * num_nodes, size) if _spans(first, size, ranks_per_node))
    rank_zero_warn(
        f"tensor_parallel_size={size} does not divide the {ranks_per_node} ranks of a node, so tensor ranks such as"
        f" {start} to {start + size - 1} lie on several of the {num_nodes} nodes, and each layer waits for the network"
        f" between them; set tensor_parallel_size to a divisor of {ranks_per_node}, or devices to a multiple of {size}"
    )


def _spans(first: int, size: int, ranks_per_node: int) -> bool:
    return first // ranks_per_node != (first + size - 1) // ranks_per_node


class KeyedDraws:
    """Draws inside of sharded regions differ between tensor ranks, and depend on their key alone."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """Args: rank: the tensor rank. device: where units draw; their generator is seeded for each draw."""
        self._device, self._rank = device, rank

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context around one draw."""
        generator = torch.default_generator
        if self._device.type == "cuda":
            generator = torch.cuda.default_generators[self._device.index or 0]
        before, key = generator.get_state(), generator.initial_seed()
        generator.manual_seed(hash((key, self._rank + 1)) & 0x7FFFFFFFFFFFFFFF)
        try:
            yield
        finally:
            generator.set_state(before)


# Replicas that share parameters out may have different numbers of these.
_PER_EVALUATED_BATCH = tuple(
    f"on_{stage}_batch_{when}" for stage in ("validation", "test", "predict") for when in ("start", "end")
)


class HookReads:
    """What hooks of the user read: of all stages, and whole where ranks hold parts."""

    def __init__(
        self,
        stages: GlobalReads | None,
        parts: HeldParts | None,
        parameters: Mapping[str, nn.Parameter],
        contents: Contents,
        *,
        over_replicas: bool = False,
    ) -> None:
        """Say what is in parts.

        Args:
            stages: If there are several.
            parts: If parameters are cut.
            parameters: Of the module, by FQN.
            contents: By which the ranks that hold parts find out that they do not read the same.
            over_replicas: Whether replicas hold parts of one copy.
        """
        self._over_replicas = over_replicas
        self._stages = stages
        self._contents = contents
        self._cuts = None
        if parts is not None:
            note = None if stages is None else stages.note_whole
            self._cuts = CutReads(parts, parameters, note, self._meet)
        self._depth = 0
        self._hook = ""

    def _meet(self, name: str) -> None:
        self._contents.meet(self._hook, f"reads {name}")

    def for_optimizer(self, optimizer: Optimizer) -> HookReads | None:
        """What the step of an optimizer must run in; None if it does the same to parts as to the whole."""
        if looks_at_all(optimizer):
            return self
        if self._cuts is None or steps_on_parts(optimizer):
            return None
        alone = copy.copy(self)  # torch's own look at one parameter at a time, whatever its stage
        alone._stages = None
        return alone

    @contextlib.contextmanager
    def hook(self, name: str, *, is_complete: bool = True) -> Iterator[None]:
        """As ``GlobalReads.hook``."""
        outer = self._depth == 0
        self._depth += 1
        if outer:
            self._hook = name
        try:
            with contextlib.ExitStack() as stack:
                if self._stages is not None:
                    stack.enter_context(self._stages.hook(name, is_complete=is_complete))
                if self._cuts is not None and outer:
                    if not (self._over_replicas and name.endswith(_PER_EVALUATED_BATCH)):
                        stack.enter_context(self._contents.compared(name))
                    stack.enter_context(self._cuts)
                yield
        finally:
            self._depth -= 1

    def known(self, value: Any) -> Any:
        """As ``GlobalReads.known``."""
        return value if self._stages is None else self._stages.known(value)

    def is_here(self, tensor: Tensor) -> bool | None:
        """Whether all ranks have the whole of a tensor; None if it is not here, and nobody knows where it is."""
        if self._cuts is not None and (known := self._cuts.is_part(tensor)) is not False:
            return None if known is None else False
        return not is_absent(tensor) if self._stages is None else self._stages.is_here(tensor)

    def told(self, mine: Any) -> list[Any]:
        """What each rank says that has a part of this copy of the module; collective over them."""
        said = self._contents.told(mine)
        return said if self._stages is None else [each for row in self._stages.told(said) for each in row]

    def for_file(self, tensors: Sequence[Tensor], *, keep: bool) -> list[Tensor]:
        """As ``GlobalReads.for_file``."""
        wholes = list(tensors) if self._cuts is None else [self._cuts.whole(tensor) for tensor in tensors]
        return wholes if self._stages is None else self._stages.for_file(wholes, keep=keep)

    def adopt_state(self, state: Mapping[Any, Any]) -> None:
        """As ``GlobalReads.adopt_state``."""
        if self._cuts is not None:
            self._cuts.make_state_whole(state)
        if self._stages is not None:
            self._stages.adopt_state(state)


def summarize_wholes(callback: Any, reads: HookReads) -> Callable[[], None]:
    """Let Lightning's model summary count whole parameters; returns what undoes it."""
    original = callback.on_fit_start

    def on_fit_start(*args: Any, **kwargs: Any) -> None:
        with reads.hook("ModelSummary.on_fit_start"):
            original(*args, **kwargs)

    callback.on_fit_start = on_fit_start
    return lambda: callback.__dict__.pop("on_fit_start", None)


def describe_tensor_plans(plans: Mapping[str, UnitPlan], summary: str = "") -> str:
    """The plans in words; units with one plan share its lines.

    Args:
        plans: By FQN of the unit.
        summary: Where they came from.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for fqn, plan in plans.items():
        alike.setdefault(tuple(plan.lines()), []).append(fqn)
    lines = []
    for text, fqns in alike.items():
        lines.append(fqns[0] if len(fqns) == 1 else f"{fqns[0]} .. {fqns[-1]} ({len(fqns)})")
        lines += [f"    {line}" for line in text]
    if summary:
        lines.append(summary)
    return "\n".join(lines)


def steps_on_parts(optimizer: Optimizer) -> bool:
    """Whether an optimizer does to the parts of a parameter what it does to the whole; tried on a small one."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.rand(4, 6, dtype=torch.float64, generator=generator) + 0.1
    gradients = [torch.rand(4, 6, dtype=torch.float64, generator=generator) - 0.4 for _ in range(2)]
    try:
        expected = _stepped(optimizer, [whole], [[gradient] for gradient in gradients])[0]
        for dim in (0, 1):
            parts = [part.contiguous() for part in whole.chunk(2, dim)]
            given = [[part.contiguous() for part in gradient.chunk(2, dim)] for gradient in gradients]
            if not torch.allclose(torch.cat(_stepped(optimizer, parts, given), dim), expected, rtol=1e-9, atol=1e-12):
                return False
    except Exception:
        return False
    return True


def _stepped(
    optimizer: Optimizer, starts: list[torch.Tensor], gradients: list[list[torch.Tensor]]
) -> list[torch.Tensor]:
    parameters = [nn.Parameter(start.clone()) for start in starts]
    twin = twin_of(optimizer, parameters)
    for given in gradients:
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(twin)
    return [parameter.detach() for parameter in parameters]
