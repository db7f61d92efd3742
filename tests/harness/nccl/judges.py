"""The rules, as functions over the traces of all ranks; each returns the faults that it finds, in words."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from harness.nccl.replay import Machine, Replay, stuck_at_device_synchronisation
from harness.nccl.trace import Event, Launch, Objects, Ops, Sync, Trace, Violation, Wait, peaks_in_flight

_MEETS = {"send": "recv", "recv": "send"}


def disagreements(traces: Sequence[Trace]) -> list[str]:
    """The k-th operation of a communicator is the same on all its members."""
    rows: dict[str, dict[int, list[Launch]]] = {}
    for trace in traces:
        for launch in _launches(trace):
            rows.setdefault(launch.comm, {}).setdefault(trace.rank, []).append(launch)
    return [text for comm, of_rank in rows.items() for text in _disagreements_of(comm, of_rank)]


def _disagreements_of(comm: str, rows: Mapping[int, Sequence[Launch]]) -> Iterator[str]:
    members = next(iter(rows.values()))[0].members
    counts = {rank: len(rows.get(rank, [])) for rank in members}
    if len(set(counts.values())) > 1:
        yield f"{comm}: numbers of operations {counts}"
    first = members[0]
    for rank in members[1:]:
        for index, (one, other) in enumerate(zip(rows.get(first, []), rows.get(rank, []), strict=False)):
            if not _meet(one, other, members.index(first), members.index(rank)):
                yield (
                    f"{comm}: operation {index} is {_described(one)} on rank {first} ({one.line}) and"
                    f" {_described(other)} on rank {rank} ({other.line})"
                )
                break


def _meet(one: Launch, other: Launch, here: int, there: int) -> bool:
    if (_MEETS.get(one.kind, one.kind), one.dtype, one.root) != (other.kind, other.dtype, other.root):
        return False
    if one.kind != "alltoall":
        return one.sizes == other.sizes
    size = len(one.members)
    sent, received = one.sizes[there], other.sizes[size + here]
    return sent == received and other.sizes[here] == one.sizes[size + there]


def _described(launch: Launch) -> str:
    root = f" from {launch.root}" if launch.root >= 0 else ""
    return f"{launch.kind} of {launch.sizes} {launch.dtype}{root}"


def stuck(traces: Sequence[Trace]) -> list[str]:
    """No rank gets stuck where the device does nothing before it must."""
    return _stuck_on(traces, Machine())


def stuck_in_one_queue(traces: Sequence[Trace]) -> list[str]:
    """Nor where all streams of a device share one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``)."""
    return _stuck_on(traces, Machine(has_one_queue=True))


def stuck_when_connecting(traces: Sequence[Trace]) -> list[str]:
    """Nor where the first use of a communicator makes it, and blocks the host."""
    return _stuck_on(traces, Machine(connects_late=True))


def stuck_at_allocations(traces: Sequence[Trace]) -> list[str]:
    """Nor where a rank waits for its whole device once, as before an allocation that is tried again."""
    return list(stuck_at_device_synchronisation(traces))


def _stuck_on(traces: Sequence[Trace], machine: Machine) -> list[str]:
    replay = Replay(traces, machine)
    replay.run()
    return replay.stuck()


def violations(traces: Sequence[Trace]) -> list[str]:
    """Nothing was wrong at a call: inputs stay as they are, no work is dropped, no host tensor is sent."""
    found = ((trace.rank, event) for trace in traces for event in trace.of(Violation))
    return [f"rank {rank}: {v.rule}: {v.text} ({v.line})" for rank, v in found if isinstance(v, Violation)]


def device_objects(traces: Sequence[Trace]) -> list[str]:
    """No tensor of the device is pickled in an exchange of objects."""
    return [
        f"rank {trace.rank}: {event.kind} of {', '.join(event.on_device)} ({event.line})"
        for trace in traces
        for event in trace.of(Objects)
        if isinstance(event, Objects) and event.on_device
    ]


def growth(small: Sequence[Trace], large: Sequence[Trace]) -> list[str]:
    """Bytes of operations not waited for do not grow with layers or microbatches, of which `large` has more."""
    found = []
    for one, other in zip(small, large, strict=True):
        before, after = (peaks_in_flight(trace.steps[-1]) for trace in (one, other))
        found += [
            f"rank {one.rank}: {before[line]} bytes in flight become {peak} ({line})"
            for line, peak in after.items()
            if peak > before.get(line, peak)
        ]
    return found


def host_syncs(traces: Sequence[Trace]) -> dict[str, int]:
    """Host synchronisations of the last step by file and function, on the rank that has most.

    Without those of the user's code, and of a comparison of layouts.
    """
    found: Counter[str] = Counter()
    for trace in traces:
        found |= _syncs_of(trace)
    return dict(sorted(found.items()))


def most_syncs(traces: Sequence[Trace]) -> int:
    """Host synchronisations of the last step on the rank that has most, without Lightning's, which any Trainer has."""
    own = (_syncs_of(trace) for trace in traces)
    return max(sum(n for line, n in found.items() if not line.startswith("lightning/")) for found in own)


def _syncs_of(trace: Trace) -> Counter[str]:
    found = (_function(event) for event in (trace.steps[-1] if trace.steps else []) if isinstance(event, Sync))
    return Counter(line for line in found if line != "user" and not line.startswith("verify/"))


def _function(event: Event) -> str:
    place, _, function = getattr(event, "line", "").partition(" ")
    return f"{place.partition(':')[0]} {function}".strip()


def more_syncs(found: Mapping[str, int], known: Mapping[str, int]) -> list[str]:
    """Lines that synchronise the host more often than the table in the repository says."""
    return [f"{line}: {n}, not {known.get(line, 0)}" for line, n in found.items() if n > known.get(line, 0)]


def sync_growth(small: Sequence[Trace], large: Sequence[Trace]) -> list[str]:
    """Host synchronisations of a step do not grow with microbatches, of which `large` has more."""
    before, after = host_syncs(small), host_syncs(large)
    return [
        f"{line}: {before.get(line, 0)} host synchronisations become {n}"
        for line, n in after.items()
        if n > before.get(line, 0)
    ]


def overlaps(traces: Sequence[Trace]) -> dict[str, float]:
    """Of the launches of the last step, by file and function, the share that has a product before the first wait.

    On a host that is infinitely fast these take no time of their own: the device computes meanwhile. A product is a
    matrix product, a convolution or attention, of which the device had been told nothing when the operation began.
    """
    found: dict[str, list[bool]] = {}
    for trace in traces:
        for launch, is_covered in _covered(trace.steps[-1] if trace.steps else trace.events):
            found.setdefault(_function(launch), []).append(is_covered)
    return {line: sum(covered) / len(covered) for line, covered in sorted(found.items())}


def _covered(events: Sequence[Event]) -> Iterator[tuple[Launch, bool]]:
    for place, launch in enumerate(events):
        if not isinstance(launch, Launch) or launch.is_host or len(launch.members) == 1:
            continue
        later = events[place + 1 :]
        waits = (at for at, event in enumerate(later) if isinstance(event, Wait) and event.number == launch.number)
        until = later[: next(waits, len(later))]
        yield launch, any(isinstance(event, Ops) and event.products > 0 for event in until)


def blocked(traces: Sequence[Trace], room: str) -> list[str]:
    """Lines of a room at which the host waits for the device before the last product of the last step."""
    found = []
    for trace in traces:
        step = trace.steps[-1] if trace.steps else trace.events
        products = [place for place, event in enumerate(step) if isinstance(event, Ops) and event.products > 0]
        before = step[: products[-1]] if products else []
        found += [event.line for event in before if isinstance(event, Sync) and event.line.startswith(room)]
    return found


def crossing_pairs(traces: Sequence[Trace]) -> list[str]:
    """Pairs of communicators whose operations do not have one order on all common members: to look at, no fault."""
    orders: dict[tuple[str, str], dict[int, list[str]]] = {}
    for trace in traces:
        launches = [launch for launch in _launches(trace) if not launch.is_host and len(launch.members) > 1]
        members = {launch.comm: launch.members for launch in launches}
        for pair in itertools.combinations(sorted(members), 2):
            if len(set(members[pair[0]]) & set(members[pair[1]])) > 1:
                row = [launch.comm for launch in launches if launch.comm in pair]
                orders.setdefault(pair, {})[trace.rank] = row
    return [f"{one} and {other}" for (one, other), rows in orders.items() if len({*map(tuple, rows.values())}) > 1]


def _launches(trace: Trace) -> Iterator[Launch]:
    return (event for event in trace.of(Launch) if isinstance(event, Launch))


# Those that hold of any run; the others compare runs.
JUDGES = {
    judge.__name__: judge
    for judge in (
        disagreements,
        stuck,
        stuck_in_one_queue,
        stuck_when_connecting,
        stuck_at_allocations,
        violations,
        device_objects,
    )
}


def judge(traces: Sequence[Trace]) -> dict[str, list[str]]:
    """The faults by rule; no entry for a rule that holds."""
    return {name: found for name, rule in JUDGES.items() if (found := rule(traces))}
