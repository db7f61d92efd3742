"""Partition of a step graph into pipeline stages.

The nodes, in order of execution, are divided into contiguous segments of balanced cost. The owner stage ("home") of a
parameter is the segment of its first use, and one rule then gives every operation its stage::

    stage(op) = max over the stages of its inputs and the owner stages of its parameters

All that a derivative inside the step differentiates through is on the latest of its stages, where the derivative is
taken. So the loss is on the last stage by itself, a value made on stage i and read on stage j > i becomes a portal
i -> j, and a parameter read on several stages is shared by them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_hybrid.errors import WITHOUT_STAGES, PartitionError, UnfitError
from lightning_hybrid.graph.step_graph import SINK, Node, StepGraph
from lightning_hybrid.text import counted, meant_of, spanned_names

# Moving one byte takes as long as about this many floating-point operations, on a CPU core as on an accelerator's
# vector units. It weighs what a FLOP count leaves out: normalisations, activations, embedding gradients.
FLOPS_PER_BYTE = 8.0

# A partition that shares more than this fraction of the parameter bytes between stages is no pipeline.
MAX_SHARED_FRACTION = 0.5


@dataclass(frozen=True)
class Assignment:
    """The stage of each node, value and parameter of one step graph."""

    graph: StepGraph  # the graph
    num_stages: int  # number of stages
    node_stage: tuple[int, ...]  # stage of each node
    value_stage: tuple[int, ...]  # stage on which each value is made
    # for each parameter read, the stages that read it, ascending; the first one owns it
    holders: Mapping[str, tuple[int, ...]]
    # for each pair (source, target) of stages the values sent, ascending
    portals: Mapping[tuple[int, int], tuple[int, ...]]
    # the stage that updates each metric, by its pseudo-parameter
    sinks: Mapping[str, int] = field(default_factory=dict)

    @property
    def loss_stage(self) -> int:
        """Stage on which the loss is made."""
        assert self.graph.loss is not None
        return self.value_stage[self.graph.loss]

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters read on more than one stage, and those stages."""
        return {name: stages for name, stages in self.holders.items() if len(stages) > 1}

    def costs(self) -> list[float]:
        """Cost of each stage, in FLOPs of its forward."""
        total = [0.0] * self.num_stages
        for node, stage in zip(self.graph.nodes, self.node_stage, strict=True):
            total[stage] += node_cost(node, self.graph)
        return total

    def gradient_portals(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The portals of values whose gradients are sent back."""
        values = self.graph.values
        pairs = {pair: tuple(v for v in sent if values[v].requires_grad) for pair, sent in self.portals.items()}
        return {pair: sent for pair, sent in pairs.items() if sent}


def node_cost(node: Node, graph: StepGraph) -> float:
    """Cost of one node, in FLOPs of its forward."""
    read = sum(graph.parameter_bytes[name] for name in node.parameters)
    return node.flops + FLOPS_PER_BYTE * (node.moved_bytes + read)


def balance(costs: Sequence[float], num_segments: int, widths: Sequence[int] = ()) -> list[int]:
    """Divide ``costs`` into ``num_segments`` contiguous non-empty segments whose largest sum is as small as possible.

    The sum of segment s is divided by ``widths[s]``, the ranks that share it; 1 each if empty.

    Returns:
        The start of each segment; the first is 0. Exact, in O(n * num_segments * log n).
    """
    count = len(costs)
    if not 1 <= num_segments <= count:
        raise PartitionError(
            f"{count} elements cannot be divided into {num_segments} non-empty segments", entry="elements"
        )
    sums = [0.0, *itertools.accumulate(costs)]
    widths = widths or [1] * num_segments
    best = [each / widths[0] for each in sums]  # best[i]: smallest largest sum over the first i elements, so far
    choice: list[list[int]] = []
    for count_so_far in range(2, num_segments + 1):
        row, starts, width = [float("inf")] * (count + 1), [0] * (count + 1), widths[count_so_far - 1]
        for end in range(count_so_far, count + 1):
            # best[] grows with its index while the last segment shrinks: their maximum is least where they meet.
            low = bisect.bisect_left(
                range(count_so_far - 1, end), True, key=lambda j: best[j] * width >= sums[end] - sums[j]
            )
            for j in (count_so_far - 1 + low, count_so_far - 2 + low):
                if count_so_far - 1 <= j < end and max(best[j], (sums[end] - sums[j]) / width) < row[end]:
                    row[end], starts[end] = max(best[j], (sums[end] - sums[j]) / width), j
        best = row
        choice.append(starts)
    cuts, end = [], count
    for starts in reversed(choice):
        end = starts[end]
        cuts.append(end)
    return [0, *reversed(cuts)]


def owner_stages(
    graph: StepGraph,
    num_stages: int,
    cuts: Sequence[str] | None = None,
    num_ranks: int = 1,
    widths: Sequence[int] = (),
) -> dict[str, int]:
    """Choose the owner stage of each parameter that the graph reads.

    Args:
        graph: The recorded training step.
        num_stages: Number of stages.
        cuts: FQNs at which the stages 1, 2, ... begin; balanced by cost if None.
        num_ranks: Number of pipeline ranks, for the error where there are too many stages.
        widths: Number of ranks of each stage; one each if empty.

    Raises:
        PartitionError: More stages than units, an unknown cut, or cuts in another order than the step runs.
    """
    if cuts is not None:
        return owners_from(graph, cut_at(graph, num_stages, cuts))
    starts, first_use = elements_of(graph)
    if num_stages > len(starts):
        reads = first_use if len(starts) > 1 else ()
        text = _too_few(graph, starts, num_ranks, num_stages // num_ranks)
        raise UnfitError(text, entry="too-many-stages", reads=reads)
    begins = [0, *starts[1:]]
    return owners_from(graph, [begins[i] for i in balance(costs_between(graph, begins), num_stages, widths)])


def elements_of(graph: StepGraph) -> tuple[list[int], dict[str, int]]:
    """The nodes at which the elements of stages start, and the node of each parameter's first use."""
    return _elements(graph, _updates(graph))


def costs_between(graph: StepGraph, begins: Sequence[int]) -> list[float]:
    """The cost of the nodes from each of ``begins`` to the next, the last to the end."""
    ends = [*begins[1:], len(graph.nodes)]
    return [sum(node_cost(node, graph) for node in graph.nodes[a:b]) for a, b in zip(begins, ends, strict=True)]


def owners_from(graph: StepGraph, begins: Sequence[int]) -> dict[str, int]:
    """The owner stage of each parameter, where stages begin at these nodes."""
    _, first_use = elements_of(graph)
    homes = {name: bisect.bisect_right(begins, node) - 1 for name, node in first_use.items()}
    return _tie_written(graph, homes, _updates(graph))


def assign(graph: StepGraph, homes: Mapping[str, int], num_stages: int) -> Assignment:
    """Give every node its stage, and derive portals and shared parameters."""
    sinks = {name: 0 for node in graph.nodes for name in node.parameters if name.startswith(SINK)}
    while True:
        # All nodes of a metric are on one stage: the latest that any of its inputs needs.
        node_stage, value_stage = _stages(graph, {**homes, **sinks})
        later = dict(sinks)
        for node, stage in zip(graph.nodes, node_stage, strict=True):
            later |= {name: max(later[name], stage) for name in node.parameters if name in later}
        if later == sinks:
            break
        sinks = later
    _check_views(graph, node_stage, value_stage)
    _check_derivatives(graph, node_stage, num_stages)
    holders: dict[str, set[int]] = {}
    portals: dict[tuple[int, int], set[int]] = {}
    for node, stage in zip(graph.nodes, node_stage, strict=True):
        for name in node.parameters:
            if name not in sinks:
                holders.setdefault(name, set()).add(stage)
        for value in (*node.inputs, *node.reads):
            if value_stage[value] != stage:
                portals.setdefault((value_stage[value], stage), set()).add(value)
    return Assignment(
        graph=graph,
        num_stages=num_stages,
        node_stage=tuple(node_stage),
        value_stage=tuple(value_stage),
        holders={name: tuple(sorted(stages)) for name, stages in holders.items()},
        portals={pair: tuple(sorted(sent)) for pair, sent in sorted(portals.items())},
        sinks=sinks,
    )


def buffer_stages(
    graph: StepGraph, homes: Mapping[str, int], names: Collection[str], num_stages: int
) -> dict[str, int]:
    """The first stages that can own the buffers ``names`` together with all that a step does with them.

    ``homes`` are the owner stages of parameters and tracked buffers; entries of ``names`` are ignored.
    """
    owners = dict.fromkeys(names, 0)
    while True:
        holders = assign(graph, {**homes, **owners}, num_stages).holders
        later = {name: max((stage, *holders.get(name, ()))) for name, stage in owners.items()}
        if later == owners:
            return owners
        owners = later


def _check_views(graph: StepGraph, node_stage: Sequence[int], value_stage: Sequence[int]) -> None:
    """Refuse a write into a view of a tensor of another stage: on another rank it is a copy, and the write is lost."""
    for node, stage in zip(graph.nodes, node_stage, strict=True):
        lost = [value for value in node.aliases if value_stage[value] != stage]
        if lost:
            raise PartitionError(
                f"{node.line}: {node.name} on stage {stage} writes into a view of a tensor from stage"
                f" {value_stage[lost[0]]}, where the write would be lost; write into the tensor itself (x[index] ="
                " value) or choose pipeline_cuts that keep both on one stage",
                entry="view-of-stage",
            )


def _check_derivatives(graph: StepGraph, node_stage: Sequence[int], num_stages: int) -> None:
    """Refuse a derivative that moves all it differentiates through to its stage, and leaves another stage empty."""
    line = next((node.line for node in graph.nodes if node.together), None)
    empty = sorted(set(range(num_stages)).difference(node_stage))
    if line is not None and empty:
        raise PartitionError(
            f"{line}: torch.autograd.grad takes a derivative, and all operations that it differentiates through must"
            f" be on one stage, which leaves stages {empty} of {num_stages} empty; set a smaller"
            f" pipeline_parallel_size or pipeline_cuts outside of the derivative, or {WITHOUT_STAGES}",
            entry="derivative",
        )


def _stages(graph: StepGraph, homes: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """The stage of each node and of each value."""
    derivatives = [(*node.together, node.index) for node in graph.nodes if node.together]
    least = [0] * len(graph.nodes)
    while True:
        node_stage, value_stage = _stages_from(graph, homes, least)
        tops = [(nodes, max(node_stage[index] for index in nodes)) for nodes in derivatives]
        raised = [(index, top) for nodes, top in tops for index in nodes if node_stage[index] < top]
        if not raised:
            return node_stage, value_stage
        for index, top in raised:
            least[index] = max(least[index], top)


def _stages_from(graph: StepGraph, homes: Mapping[str, int], least: Sequence[int]) -> tuple[list[int], list[int]]:
    value_stage = [0] * len(graph.values)
    made: set[int] = set()
    node_stage: list[int] = []
    for node in graph.nodes:
        needed = [value_stage[value] for value in (*node.inputs, *node.reads)]
        stage = max([least[node.index], *needed, *(homes[name] for name in node.parameters)])
        node_stage.append(stage)
        for value in node.outputs:
            if value not in made:  # a unit may return an input: it stays on the stage that made it
                value_stage[value] = stage
                made.add(value)
    return node_stage, value_stage


def check_shared(assignment: Assignment) -> None:
    """Refuse to partition a model that feeds its output back through its earlier layers.

    Raises:
        PartitionError: More than half of the parameter bytes would be shared between stages.
    """
    sizes = assignment.graph.parameter_bytes
    total = sum(sizes[name] for name in assignment.holders)
    shared = sum(sizes[name] for name in assignment.shared)
    if assignment.num_stages > 1 and shared > MAX_SHARED_FRACTION * total:
        worst = max(assignment.shared, key=lambda name: sizes[name])
        raise PartitionError(
            f"{assignment.graph.step} is recurrent through its stages: {shared} of {total} parameter bytes (such as"
            f" {worst!r}, read on stages {list(assignment.shared[worst])}) are used again after later layers;"
            f" {WITHOUT_STAGES}",
            entry="recurrent",
        )


def _too_few(graph: StepGraph, starts: Sequence[int], num_ranks: int, stages_per_rank: int) -> str:
    """Why the layers that begin at these nodes are too few for the stages, and the sizes that they are enough for."""
    line = next((node.line for node in graph.nodes if node.together), None)
    together = "" if line is None else f", counting all operations of the derivative at {line} as one"
    sizes = f"pipeline_parallel_size={num_ranks}"
    count = len(starts)
    names = spanned_names([node.unit or node.parameters[0] for node in map(graph.nodes.__getitem__, starts)])
    if count == 1:
        remedy = WITHOUT_STAGES
    elif stages_per_rank > 1:
        remedy = f"set pipeline_parallel_size * stages_per_rank to {count} or less"
    else:  # what divides it divides the number of devices
        fitting = ", ".join(str(size) for size in range(count, 1, -1) if num_ranks % size == 0)
        remedy = f"set pipeline_parallel_size={fitting} or 1" if fitting else "set pipeline_parallel_size=1"
        remedy += f", or {count} with devices={count}, {2 * count}, ..." if num_ranks % count else ""
    if stages_per_rank > 1:
        sizes += f" * stages_per_rank={stages_per_rank}"
    return (
        f"{sizes} makes {num_ranks * stages_per_rank} stages, but the step has only {counted(count, 'layer')} with"
        f" parameters ({names}){together}; {remedy}"
    )


def _elements(graph: StepGraph, updates: Collection[int]) -> tuple[list[int], dict[str, int]]:
    """The nodes at which a stage may begin (first users of some parameter), and each parameter's first user."""
    starts: list[int] = []
    first_use: dict[str, int] = {}
    # A derivative and all it differentiates through are on one stage: none begins in between.
    inside = {i for node in graph.nodes if node.together for i in range(min(node.together) + 1, node.index + 1)}
    for node in _uses_first(graph, updates):
        new = [name for name in node.parameters if name not in first_use and not name.startswith(SINK)]
        inside.update(_since_prepared(graph, node, first_use) if new else ())
        first_use.update(dict.fromkeys(new, node.index))
        if new:
            starts.append(node.index)
    return sorted(set(starts) - inside), first_use


def _since_prepared(graph: StepGraph, node: Node, first_use: Mapping[str, int]) -> range:
    """The nodes between the first one that computes a unit's weights from its parameters, and the unit."""
    start = min((first_use[name] for name in node.parameters if name in first_use), default=node.index)
    before = graph.nodes[start : node.index]
    made = {value for earlier in before for value in earlier.outputs}
    for earlier in before:
        if earlier.unit or not made.issuperset(earlier.inputs):
            return range(0)
        if not set(node.parameters).issuperset(earlier.parameters):
            return range(0)
    return range(start + 1, node.index + 1)


def _uses_first(graph: StepGraph, updates: Collection[int]) -> list[Node]:
    """All nodes, the ones that only update parameters last: an update is a use only if there is no other."""
    return sorted(graph.nodes, key=lambda node: (node.index in updates, node.index))


def wrong_number_of_cuts(cuts: Sequence[str], num_stages: int) -> UnfitError:
    """The error for another number of cuts than stages need."""
    return UnfitError(
        f"pipeline_cuts names {counted(len(cuts), 'module')}, but {counted(num_stages, 'stage')} need"
        f" {num_stages - 1}: name the first module of each stage from the second stage on, or change"
        f" pipeline_parallel_size or stages_per_rank for {counted(len(cuts) + 1, 'stage')}",
        entry="cuts-number",
    )


def cut_at(graph: StepGraph, num_stages: int, cuts: Sequence[str]) -> list[int]:
    """The nodes at which the stages begin, by the FQNs of ``cuts``."""
    updates = _updates(graph)
    if len(cuts) != num_stages - 1:
        raise wrong_number_of_cuts(cuts, num_stages)
    begins = []
    for cut in cuts:
        nodes = _uses_first(graph, updates)
        begin = next((n.index for n in nodes if any(_covers(cut, name) for name in _names(n))), None)
        if begin is None:
            known = sorted({name for node in graph.nodes for name in _names(node)})
            raise UnfitError(
                f"pipeline_cuts names {cut!r}, which {graph.step} never uses{meant_of(cut, known)}", entry="cuts-name"
            )
        begins.append(begin)
    if begins and min(begins) == 0:
        raise UnfitError(
            f"pipeline_cuts names {cuts[begins.index(0)]!r}, with which the first stage begins; name the first module"
            " of each stage from the second stage on",
            entry="cuts-order",
        )
    if begins != sorted(set(begins)):
        used = [cut for _, cut in sorted(dict(zip(begins, cuts, strict=True)).items())]
        raise UnfitError(
            f"pipeline_cuts={[*cuts]} are not in the order of {graph.step}, which uses {' before '.join(used)}; name"
            " each once, in this order",
            entry="cuts-order",
        )
    return [0, *begins]


def _names(node: Node) -> tuple[str, ...]:
    return (node.unit, *node.parameters) if node.unit else node.parameters


def _covers(cut: str, name: str) -> bool:
    return name == cut or name.startswith(cut + ".")


def _updates(graph: StepGraph) -> dict[int, tuple[str, ...]]:
    """Operations that only update parameters and buffers (a momentum teacher), and what each reads and writes.

    By node index: the operations that write, and the operations whose results only these use. What an operation reads
    and writes includes the names of the operations before it in such a chain.
    """
    read_by: dict[int, list[int]] = {}
    for node in graph.nodes:
        for value in (*node.inputs, *node.reads):
            read_by.setdefault(value, []).append(node.index)
    needed = {*graph.returned, *graph.kept, graph.loss}
    updating: set[int] = set()
    for node in reversed(graph.nodes):
        made_here = [value for value in node.outputs if value not in node.inputs]
        readers = [reader for value in made_here for reader in read_by.get(value, ())]
        feeds = bool(readers) and all(reader in updating for reader in readers)
        if not node.unit and needed.isdisjoint(made_here) and (feeds or (node.written and not readers)):
            updating.add(node.index)
    names: dict[int, tuple[str, ...]] = {}
    maker: dict[int, int] = {}
    for node in graph.nodes:
        if node.index in updating:
            before = [names[maker[v]] for v in (*node.inputs, *node.reads) if maker.get(v) in updating]
            found = [*node.parameters, *node.written, *(name for chain in before for name in chain)]
            names[node.index] = tuple(dict.fromkeys(name for name in found if not name.startswith(SINK)))
        for value in node.outputs:
            maker[value] = node.index
    return names


def _tie_written(graph: StepGraph, homes: dict[str, int], updates: Mapping[int, tuple[str, ...]]) -> dict[str, int]:
    """Put a parameter that the step writes on the stage of what it is computed from (momentum teacher and student)."""
    writing = [node for node in graph.nodes if node.written]
    written = {name for node in writing for name in node.written}
    together = [
        node.parameters if graph.buffers.issuperset(node.written) else updates.get(node.index, node.parameters)
        for node in writing
    ]
    for _ in range(len(homes)):
        changed = False
        for names in together:
            if len({homes[name] for name in names}) > 1:
                homes.update(dict.fromkeys(names, min(homes[name] for name in names)))
                changed = True
        if not changed:
            break
    # A parameter that the step writes has one content only if all that reads or writes it is on one stage.
    while written:
        node_stage, _ = _stages(graph, homes)
        latest = dict.fromkeys(written, 0)
        for node, stage in zip(graph.nodes, node_stage, strict=True):
            for name in written.intersection((*node.parameters, *node.written)):
                latest[name] = max(latest[name], stage)
        if all(homes[name] == stage for name, stage in latest.items()):
            break
        homes.update(latest)
    return homes
