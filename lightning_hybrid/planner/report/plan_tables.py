"""Plans as text: the ranked plans with the reasons against the others, and one layout in detail."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_hybrid.planner.report.planned_run import PlannedRun, rank_name
from lightning_hybrid.planner.search.layout_options import spelled
from lightning_hybrid.planner.search.plans_and_rejections import TIE, Plan
from lightning_hybrid.planner.search.rejected_families import larger_than_device, largest_difference, slower_than
from lightning_hybrid.text import columns, sized, timed, wrap

_LEAST_SHARE = 0.005  # of a total, below which a term is left out


def plans_table(run: PlannedRun, most: int = 5) -> str:
    """Return the best plans, the reasons against other families, and the Trainer of the first plan."""
    lines = [run.title, "", *ranked_lines(run, most), ""]
    lines += [
        f"why not{run.compared_samples(most)}",
        *columns([(f"  {rejection.family}", rejection.reason) for rejection in run.result.rejected], wrapped=1),
        "",
    ]
    lines += [run.trainer_arguments(run.result.best)]
    lines += [f"note: {note}" for note in run.costs.notes]
    return "\n".join(lines)


def ranked_lines(run: PlannedRun, most: int = 5) -> list[str]:
    """Return the best plans, each with its layout broken to lines of 120 characters, below a heading."""
    _, unit = run.rate(run.result.best)
    rows: list[tuple[str, ...]] = [("", "layout", "samples", "step", "memory", unit, "why")]
    for number, plan in enumerate(run.result.plans[:most], start=1):
        assert plan.time is not None
        rate, _ = run.rate(plan)
        step = f"{timed(plan.time.seconds)} ± {plan.time_error:.0%}"
        memory = f"{sized(plan.memory.least)} ± {plan.memory_error:.0%}"
        samples = f"{plan.time.samples:,}"
        reason = why(plan, run.result.best)
        rows.append((str(number), spelled(plan.layout), samples, step, memory, number_of(rate), reason))
    if not run.has_several_batches(most):
        rows = [(*row[:2], *row[3:]) for row in rows]
    return columns(rows, wrapped=1)


def number_of(rate: float) -> str:
    """Return a rate with three digits or more, without an exponent."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def why(plan: Plan, best: Plan) -> str:
    """Return in some words why a plan has its rank."""
    assert plan.time is not None and best.time is not None
    if plan is best:
        seconds = sum(plan.time.terms.values())
        shares = sorted(plan.time.terms.items(), key=lambda term: -term[1])[:2]
        return "chosen: " + ", ".join(f"{name} {share / seconds:.0%}" for name, share in shares)
    ratio = plan.seconds_per_sample / best.seconds_per_sample - 1
    if ratio <= TIE:
        return "a tie; less simple" if plan.fits_with_error else "a tie, but may not fit"
    own, other = plan.time, best.time
    name = largest_difference(own, other)
    more = own.terms.get(name, 0.0) * other.samples / own.samples - other.terms.get(name, 0.0)
    return f"{ratio:.0%} slower: {name} +{timed(more)}"


def explained_layout(run: PlannedRun, plan: Plan) -> str:
    """Return one layout in detail, against the chosen plan: time by term, memory by rank."""
    best = run.result.best
    against = f"{spelled(plan.layout)} against the chosen {spelled(best.layout)}"
    lines = [run.title, "", *wrap(against), "", *wrap(_verdict(plan, best))]
    if plan.time is not None:
        assert best.time is not None
        scale = best.time.samples / plan.time.samples
        own = {name: scale * seconds for name, seconds in plan.time.terms.items()}
        lines += ["", *_terms(f"time of {best.time.samples:,} samples", own, best.time.terms)]
    for rank, terms in enumerate(plan.memory.ranks):
        if rank in (0, len(plan.memory.ranks) - 1) or sum(terms.values()) == plan.memory.peak:
            lines += ["", *_memory(rank, terms, plan, best)]
    lines += ["", *(f"note: {note}" for note in run.costs.notes)]
    return "\n".join(lines)


def _verdict(plan: Plan, best: Plan) -> str:
    if not plan.fits:
        return f"does not fit: {larger_than_device(plan)}"
    if plan.layout == best.layout:
        return "it is the chosen plan"
    faster = 1 - plan.seconds_per_sample / best.seconds_per_sample
    if faster > TIE:
        return f"a sample takes {faster:.0%} less time: what is fixed, or the objective, rules the layout out"
    return slower_than(plan, best)


def _terms(heading: str, own: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    totals = sum(own.values()), sum(other.values())
    rows: list[tuple[str, ...]] = [(heading, "this layout", "chosen")]
    for name in dict.fromkeys([*own, *other]):
        values = own.get(name, 0.0), other.get(name, 0.0)
        if any(value > _LEAST_SHARE * total for value, total in zip(values, totals, strict=True)):
            rows.append((f"  {name}", *map(timed, values)))
    return columns([*rows, ("  in all", *map(timed, totals))])


def _memory(rank: int, own: Mapping[str, float], plan: Plan, best: Plan) -> list[str]:
    ranks = best.memory.ranks
    peak = max(range(len(ranks)), key=lambda other: sum(ranks[other].values()))
    largest = ranks[peak]
    totals = sum(own.values()), sum(largest.values())
    heading = f"memory of {rank_name(rank, plan)}"
    rows: list[tuple[str, ...]] = [(heading, "this layout", "chosen, at its peak")]
    for name in dict.fromkeys([*own, *largest]):
        values = own.get(name, 0.0), largest.get(name, 0.0)
        if any(value > _LEAST_SHARE * total for value, total in zip(values, totals, strict=True)):
            rows.append((f"  {name}", *map(sized, values)))
    rows.append(("  in all", *map(sized, totals)))
    needed = totals[0] - plan.memory.spare(rank), totals[1] - best.memory.spare(peak)
    rows.append(("  needed, without what the allocator gives back", *map(sized, needed)))
    return columns([*rows, ("  of a device", sized(best.memory.capacity), "")])
