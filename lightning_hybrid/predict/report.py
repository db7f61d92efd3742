"""`PlannedRun`: a search with what it was made for, as the reports show it: Trainer arguments, and plans as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hybrid.predict.costs.layers import ModelCosts
from lightning_hybrid.predict.families import larger_than_device, largest_difference, slower_than, within_error
from lightning_hybrid.predict.hardware import Hardware
from lightning_hybrid.predict.layout import (
    FLOAT8,
    NumberFormat,
    layout_from_options,
    number_format_of,
    spelled,
    strategy_options,
)
from lightning_hybrid.predict.plans import TIE, Plan, Rejection, SearchResult
from lightning_hybrid.predict.search import predict_plan
from lightning_hybrid.predict.words import words_of
from lightning_hybrid.text import columns, counted, sized, timed, wrap

_TOY = 0.01  # of a device, below which the states of a model need no layout
_LEAST_SHARE = 0.005  # of a total, below which a term is left out


@dataclass(frozen=True)
class PlannedRun:
    """A search and its input."""

    result: SearchResult  # of the search
    costs: ModelCosts  # of the model
    number_format: NumberFormat  # of its parameters
    hardware: Hardware  # of the cluster
    devices: int  # devices of each node
    num_nodes: int  # number of nodes
    precision: str  # as the Trainer spells it

    @property
    def title(self) -> str:
        """The model and the cluster in a line."""
        costs, devices = self.costs, self.devices * self.num_nodes
        nodes = f"{self.num_nodes} nodes of {self.devices}" if self.num_nodes > 1 else "one node"
        return (
            f"{costs.name}: {_count(costs.parameters)} parameters, {costs.num_layers} units, on {devices}"
            f" {self.hardware.name} ({nodes}), {self.precision}"
        )

    @property
    def samples(self) -> str:
        """The samples of a step of the chosen plan, in words."""
        of_tokens = f" of {self.costs.positions:,} tokens" if self.costs.is_sequence else ""
        return f"a step takes {counted(self.result.best.layout.batch, 'sample')}{of_tokens}"

    def trainer_arguments(self, plan: Plan) -> str:
        """Return the Trainer of a plan in Python, with the batch size that its loader should have."""
        layout = plan.layout
        chosen = strategy_options(layout)
        if layout.data == layout.ranks > 1 and not layout.shards("states"):
            chosen = {"data_parallel_size": layout.data, **chosen}  # or the strategy would plan, were memory short
        options = "".join(f"\n        {name}={value!r}," for name, value in chosen.items())
        devices, nodes = self.devices, self.num_nodes
        if layout.ranks < devices * nodes:
            devices, nodes = min(layout.ranks, devices), max(1, layout.ranks // devices)
        replicas = "replica" if layout.data == 1 else "replicas"
        accelerator = '    accelerator="cpu",\n' if self.hardware.is_host else ""
        return (
            (
                f"Trainer(\n{accelerator}    devices={devices},\n    num_nodes={nodes},\n"
                f"    {self._precision_argument},\n"
                f"    strategy=Hybrid3DStrategy({options}\n    ),\n)\n"
                f"# batch_size={layout.batch // layout.data} of the loader, for each of {layout.data} {replicas}"
            )
            .replace("Hybrid3DStrategy(\n    )", "Hybrid3DStrategy()")
            .replace("'", '"')
        )

    @property
    def _precision_argument(self) -> str:
        float8 = "plugins=HybridPrecision('bf16-mixed', float8=Float8())"
        return float8 if self.precision == FLOAT8 else f"precision={self.precision!r}"

    def has_several_batches(self, most: int) -> bool:
        """Return whether the best plans differ in the samples of a step."""
        return len({plan.layout.batch for plan in self.result.plans[:most]}) > 1

    def compared_samples(self, most: int) -> str:
        """Return the samples for which reasons give times, where the best plans differ in the samples of a step."""
        samples = self.result.best.layout.batch
        return f", times of {samples:,} samples" if self.has_several_batches(most) else ""

    def rate(self, plan: Plan) -> tuple[float, str]:
        """Return the throughput over all devices, in tokens, or samples where these are no sequences."""
        assert plan.time is not None
        positions = self.costs.positions
        return plan.time.samples_per_second * positions, "tokens/s" if positions > 1 else "samples/s"

    def utilization(self, plan: Plan) -> float:
        """Return the model FLOPs utilization (MFU): the model's FLOP/s as a share of the data sheet's."""
        assert plan.time is not None
        return plan.time.flops_per_rank / plan.time.seconds / self.hardware.peak(self.number_format.products)

    def content(self, most: int = 5) -> dict[str, Any]:
        """Return the plans as plain values."""
        return {
            "model": {
                "name": self.costs.name,
                "parameters": self.costs.parameters,
                "units": self.costs.num_layers,
                "positions": self.costs.positions,
                "forward_flops_per_sample": self.costs.flops,
                "is_traced": self.costs.is_traced,
                "notes": list(self.costs.notes),
            },
            "hardware": self.hardware.name,
            "devices": self.devices,
            "num_nodes": self.num_nodes,
            "precision": self.precision,
            "evaluated": self.result.evaluated,
            "plans": [self.plan_content(plan) for plan in self.result.plans[:most]],
            "rejected": [
                {
                    "family": rejection.family,
                    "reason": rejection.reason,
                    "layout": None if rejection.layout is None else spelled(rejection.layout),
                }
                for rejection in self.result.rejected
            ],
            "trainer": self.trainer_arguments(self.result.best),
        }

    def plan_content(self, plan: Plan) -> dict[str, Any]:
        """Return one plan as plain values: seconds, bytes."""
        layout = {name: _plain(value) for name, value in plan.layout.fields.items()}
        content: dict[str, Any] = {
            "layout": spelled(plan.layout),
            "options": strategy_options(plan.layout),
            "fields": layout,
            "fits": plan.fits,
            "may_fit": plan.may_fit,
            "memory": plan.memory.least,
            "memory_error": plan.memory_error * plan.memory.least,
            "memory_of_ranks": [dict(rank) for rank in plan.memory.ranks],
            "capacity": plan.memory.capacity,
        }
        if plan.time is not None:
            content |= {
                "seconds": plan.time.seconds,
                "seconds_error": plan.time_error * plan.time.seconds,
                "is_calibrated": plan.is_calibrated,
                "terms": dict(plan.time.terms),
                "samples_per_second": plan.time.samples_per_second,
                "model_flops_utilization": self.utilization(plan),
            }
        return content


def rank_name(rank: int, plan: Plan) -> str:
    """Return how a report calls a pipeline rank of a plan."""
    return f"pipeline rank {rank}" if plan.layout.pipeline > 1 else "each rank"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _count(number: float) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:,.1f} {word}"
    return f"{number:,.0f}"


def plans_table(run: PlannedRun, most: int = 5) -> str:
    """Return the best plans, what their words mean, the reasons against other families, and the first one's Trainer."""
    spellings = [spelled(plan.layout) for plan in run.result.plans[:most]]
    lines = [*wrap(run.title), run.samples, "", *ranked_lines(run, most), ""]
    form, alone = run.number_format, _alone(run)
    if run.costs.parameters * (form.parameter + form.gradient + form.state) < _TOY * alone.memory.capacity:
        held = f"{sized(alone.memory.least)} of {sized(alone.memory.capacity)}"
        lines.insert(0, f"the step fits one device ({held}): no layout is needed, and further devices are replicas")
        return "\n".join([*lines, run.trainer_arguments(run.result.best), *note_lines(run)])
    lines += [
        f"why not{run.compared_samples(most)}",
        *columns([(f"  {family}", reason) for family, reason in _reasons(run.result.rejected)], wrapped=1),
        "",
        "words",
        *columns([(f"  {word}", meaning) for word, meaning in words_of(spellings)], wrapped=1),
        "",
    ]
    lines += [run.trainer_arguments(run.result.best), *note_lines(run)]
    return "\n".join(lines)


def _alone(run: PlannedRun) -> Plan:
    """Return the plan of one device with the chosen one's batch of a replica."""
    best = run.result.best.layout
    layout = layout_from_options({}, 1, best.batch // best.data, microbatch=best.microbatch)
    return predict_plan(run.costs, layout, run.number_format, run.hardware)


def _in_half(run: PlannedRun) -> str:
    """Return the note on what the chosen plan would take in bfloat16; "" where that is not faster."""
    best, half = run.result.best, number_format_of("bf16-mixed", run.number_format.state)
    if run.precision != "32-true" or half.products not in run.hardware.product_flops:
        return ""
    other = predict_plan(run.costs, best.layout, half, run.hardware)
    if other.time is None or best.time is None or other.time.seconds > 0.95 * best.time.seconds:
        return ""
    return (
        f"--precision bf16-mixed would take {timed(other.time.seconds)} in place of {timed(best.time.seconds)}, and"
        f" {sized(other.memory.least)} in place of {sized(best.memory.least)} of memory"
    )


def _reasons(rejected: Sequence[Rejection]) -> Iterator[tuple[str, str]]:
    """The families with their reasons; families of one layout share a reason, which is given once."""
    first: dict[str, str] = {}
    for rejection in rejected:
        family = first.setdefault(rejection.reason, rejection.family)
        is_again = rejection.layout is not None and family != rejection.family
        yield rejection.family, f"the same layout as under {family!r}" if is_again else rejection.reason


def note_lines(run: PlannedRun) -> list[str]:
    """Return the notes on the costs and on the hardware, in lines."""
    notes = [*filter(None, [_in_half(run)]), *run.costs.notes]
    if not run.result.best.is_calibrated:
        notes.append(f"uncalibrated: no run like this was compared, so that the error bar is {_bar(run.result.best)}")
    if not run.result.best.fits_with_error:
        notes.append(f"the chosen plan {within_error(run.result.best)}; no plan was found that fits with it")
    if run.hardware.assumed:
        notes.append(f"{run.hardware.name} leaves out {', '.join(run.hardware.assumed)}: defaults, measured nowhere")
    return [line for note in notes for line in wrap(f"note: {note}")]


def _bar(plan: Plan) -> str:
    return f"{plan.time_error:.0%}, that of published runs whose source was left out of the fit"


def ranked_lines(run: PlannedRun, most: int = 5) -> list[str]:
    """Return the best plans below a heading, each with its layout in lines and the reason of its rank below."""
    head, *plans = ranked_rows(run, most)
    above, below = zip(*(cell.split("\n") if "\n" in cell else ("", cell) for cell in head), strict=True)
    lines: list[str] = []
    reasons = iter([[], *([f"     {reason}"] for *_, reason in plans)])
    for line in columns([above[:-1], below[:-1], *(row for *row, _ in plans)], wrapped=1):
        if line[:1].isdigit():  # the next plan
            lines += next(reasons)
        lines.append(line)
    return [*lines, *next(reasons)]


def ranked_rows(run: PlannedRun, most: int) -> list[tuple[str, ...]]:
    """Return a heading and the best plans: number, layout, samples if these differ, step, memory, rates and why."""
    measures = "step", f"memory\nof {sized(run.hardware.memory)}", f"{run.rate(run.result.best)[1]}\nper device", "MFU"
    rows: list[tuple[str, ...]] = [("", "layout", "samples", *measures, "micro-\nbatch", "why")]
    for number, plan in enumerate(run.result.plans[:most], start=1):
        assert plan.time is not None
        step = f"{timed(plan.time.seconds)} ± {plan.time_error:.0%}{'' if plan.is_calibrated else ' uncalibrated'}"
        memory = f"{sized(plan.memory.least)} ± {plan.memory_error:.0%}"
        rates = number_of(run.rate(plan)[0] / plan.layout.ranks), f"{run.utilization(plan):.0%}"
        sizes = str(plan.layout.microbatch), why(plan, run.result.best)
        rows.append((str(number), spelled(plan.layout), f"{plan.time.samples:,}", step, memory, *rates, *sizes))
    return rows if run.has_several_batches(most) else [(*row[:2], *row[3:]) for row in rows]


def number_of(rate: float) -> str:
    """Return a rate with three digits or more, without an exponent."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def why(plan: Plan, best: Plan) -> str:
    """Return in some words why a plan has its rank."""
    assert plan.time is not None and best.time is not None
    if plan is best:
        seconds = sum(plan.time.terms.values())
        shares = sorted(plan.time.terms.items(), key=lambda term: -term[1])[:2]
        words = ", ".join(f"{name} {share / seconds:.0%}" for name, share in shares)
        return f"chosen: {words}" if plan.fits_with_error else f"chosen, but may not fit: {words}"
    ratio = plan.seconds_per_sample / best.seconds_per_sample - 1
    if ratio < -TIE:
        words = f"{-ratio:.0%} faster, within the error bar"
        return f"{words}; less simple" if plan.fits_with_error else f"{words}, but may not fit"
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
    lines = [*wrap(run.title), "", *wrap(against), "", *wrap(_verdict(plan, best))]
    if plan.time is not None:
        assert best.time is not None
        scale = best.time.samples / plan.time.samples
        own = {name: scale * seconds for name, seconds in plan.time.terms.items()}
        lines += ["", *_terms(f"time of {best.time.samples:,} samples", own, best.time.terms)]
    for rank, terms in enumerate(plan.memory.ranks):
        if rank in (0, len(plan.memory.ranks) - 1) or sum(terms.values()) == plan.memory.peak:
            lines += ["", *_memory(rank, terms, plan, best)]
    return "\n".join([*lines, "", *note_lines(run)])


def _verdict(plan: Plan, best: Plan) -> str:
    if not plan.fits:
        return larger_than_device(plan) if plan.may_fit else f"does not fit: {larger_than_device(plan)}"
    if plan.layout == best.layout:
        return "it is the chosen plan"
    faster = 1 - plan.seconds_per_sample / best.seconds_per_sample
    if faster > plan.time_error:
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
