"""The command ``lightning-hybrid plan path.to:Module --hardware h100 --devices 8``: the layout of a run, and why."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hybrid.cli.classes import FLAGS, ConfiguredRun, existing_file
from lightning_hybrid.cli.command import (
    OK,
    REFUSED,
    UsageError,
    add_command,
    check_counts,
    print_json,
    usage_errors,
    write_text,
)
from lightning_hybrid.cli.module import (
    IMPORTING,
    add_classes_to,
    add_precision_to,
    configured,
    data_and_device_errors,
    reads_storage,
)
from lightning_hybrid.cli.progress import Progress
from lightning_hybrid.errors import HybridError
from lightning_hybrid.memory.amounts import parse_budget
from lightning_hybrid.predict.checks import check_options, misfits
from lightning_hybrid.predict.costs.config import costs_from_config
from lightning_hybrid.predict.hardware import Hardware, load_hardware, preset_names
from lightning_hybrid.predict.html import html_report
from lightning_hybrid.predict.layout import FLOAT8, Allowed, fixed_fields, layout_from_options, number_format_of
from lightning_hybrid.predict.measured import corrected_by
from lightning_hybrid.predict.plans import OBJECTIVES, Plan
from lightning_hybrid.predict.report import PlannedRun, explained_layout, plans_table
from lightning_hybrid.predict.search import check_cluster, cluster_of, predict_plan, search_layouts
from lightning_hybrid.schedule.measured.seconds import FILE_NAME, MeasuredCosts, load_measured_costs
from lightning_hybrid.text import counted, wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_hybrid.planning.costs import RecordedCosts
    from lightning_hybrid.predict.costs.layers import ModelCosts
    from lightning_hybrid.predict.layout import NumberFormat, PlanLayout

_EXAMPLE = """example:
  lightning-hybrid plan train.py:Classifier --hardware cpu --devices 4
  lightning-hybrid plan --config-json config.json --hardware h100 --num-nodes 4 --batch 512 --html plan.html
  lightning-hybrid plan --config-json config.json --sequence 4096 --devices 8 --batch 64 --why tp=8,zero=1

exit status: 0 ok; 2 invalid command line; 3 no layout fits the cluster, or there is no such cluster"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = add_command(
        commands,
        "plan",
        run,
        text="choose the layout of a module on a cluster, and say why not the others",
        description="Predicts the memory and the step time of layouts of a model on a cluster, and prints the best, the"
        " reason against each family of the others, and the arguments of the Trainer. The model is a module, whose step"
        " is recorded on one batch in this process, or a configuration of a transformer as Hugging Face writes it."
        f" {FLAGS}",
        example=_EXAMPLE,
    )
    add_classes_to(parser)
    parser.add_argument(
        "--config-json", metavar="PATH", help="a transformer's config.json, or its folder, instead of a module"
    )
    parser.add_argument("--sequence", type=int, help="tokens of a sample, with --config-json (2048)")
    parser.add_argument("--hardware", default="a100-80", help=f"{', '.join(preset_names())}, or a file (%(default)s)")
    parser.add_argument("--devices", type=int, default=8, help="of each node (%(default)s)")
    parser.add_argument("--num-nodes", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--batch", type=int, help="samples of an optimizer step (the loader's, of each replica)")
    words = "config's or 32-true; bf16-mixed with --config-json; float8: bf16-mixed with linear layers in float8"
    add_precision_to(parser, words, more=(FLOAT8,))
    parser.add_argument("--objective", choices=OBJECTIVES, default="throughput", help="(%(default)s)")
    parser.add_argument("--max-memory", metavar="20GiB", help="of a device that may be used (all)")
    parser.add_argument("--fix", metavar="tp=2,zero=1", help="sizes and options that are not chosen")
    parser.add_argument("--why", metavar="tp=8,pp=2", help="explain this layout against the chosen one")
    parser.add_argument(
        "--measured", type=Path, metavar="PATH", help="correct by measured_costs.json of a run, or its folder"
    )
    parser.add_argument("--plans", type=int, default=5, help="to print (%(default)s)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report to this file too")


@dataclass(frozen=True)
class _Request:
    """What the arguments say of the search, checked before a module is imported and recorded."""

    hardware: Hardware  # of the cluster
    max_memory: float | None  # bytes of a device that may be used; all if None
    fixed: dict[str, Any]  # fields of a layout that are not chosen
    explained: dict[str, Any] | None  # options of the layout to explain, if there is one
    measured: MeasuredCosts | None  # of a run, by which predictions are corrected


def run(parsed: argparse.Namespace) -> int:
    """Plan, print the plans, and return the exit status.

    Raises:
        UsageError: An invalid path, layout, number or argument of a class.
    """
    check_counts(parsed, "devices", "num_nodes", "plans", "batch", "sequence")
    if parsed.module is not None and parsed.module.endswith(".json"):  # before torch is imported
        raise UsageError(f"{parsed.module} is no module; a transformer's configuration is given by --config-json PATH")
    request = _request(parsed)
    try:
        check_cluster(request.hardware, parsed.devices, parsed.num_nodes)
        with Progress("plan") as progress:
            planned = _planned(parsed, request, progress)
    except HybridError as error:
        if parsed.json:
            print_json({"refused": str(error)})
        else:
            print(wrapped(f"refused: {error}"))
        return REFUSED
    _check_microbatches(planned.result.best.layout, request.fixed, f"--fix {parsed.fix}")
    explained = None if request.explained is None else _explained(parsed, request.explained, planned)
    if parsed.html is not None:
        write_text(parsed.html, html_report(planned, parsed.plans), "--html")
    if parsed.json:
        content = planned.content(parsed.plans)
        print_json(content if explained is None else {**content, "why": planned.plan_content(explained)})
    else:
        print(plans_table(planned, parsed.plans) if explained is None else explained_layout(planned, explained))
    return OK


def _request(parsed: argparse.Namespace) -> _Request:
    with usage_errors():
        hardware = load_hardware(parsed.hardware)
    budget = None if parsed.max_memory is None else parse_budget(parsed.max_memory)
    if parsed.max_memory is not None and (budget is None or budget.nbytes is None):
        raise UsageError(f"--max-memory {parsed.max_memory}; use a number of bytes with its unit such as 20GiB")
    if parsed.html is not None and not parsed.html.parent.is_dir():
        raise UsageError(f"--html {parsed.html}: there is no folder {parsed.html.parent}")
    return _Request(
        hardware,
        None if budget is None else budget.nbytes,
        {} if parsed.fix is None else fixed_fields(_options(parsed.fix, "--fix")),
        None if parsed.why is None else _options(parsed.why, "--why"),
        None if parsed.measured is None else _measured(parsed.measured),
    )


def _model(parsed: argparse.Namespace, progress: Progress) -> tuple[ModelCosts, NumberFormat, int, str]:
    """Return the costs, the number format, the loader's batch size (1 of a configuration) and the precision."""
    if parsed.config_json is None:
        if parsed.sequence is not None:
            raise UsageError("--sequence is for --config-json; a module's samples are those of its loader")
        with data_and_device_errors():
            return _recorded(parsed, progress)
    if parsed.module is not None or parsed.config:
        raise UsageError("--config-json describes the model; leave the module and --config out")
    precision = parsed.precision or "bf16-mixed"
    given = Path(parsed.config_json)
    path = existing_file(str(given / "config.json" if given.is_dir() else given))
    if parsed.batch is None:
        raise UsageError("--batch is needed with --config-json: samples of an optimizer step over all replicas")
    config = _configuration(path, parsed.config_json)
    sequence = 2048 if parsed.sequence is None else parsed.sequence
    with usage_errors():
        number_format = number_format_of(_recorded_precision(precision))
    try:
        return costs_from_config(config, sequence), number_format, 1, precision
    except ValueError as error:
        raise UsageError(f"--config-json {parsed.config_json}: {error}") from error


def _recorded_precision(precision: str) -> str:
    """Return the precision of parameters and activations."""
    if precision.startswith("transformer-engine"):
        raise UsageError(
            f"--precision {precision}: the strategy runs without Lightning's plugin of Transformer Engine; for products"
            f" in float8 use --precision {FLOAT8}"
        )
    return "bf16-mixed" if precision == FLOAT8 else precision


def _in_float8(number_format: NumberFormat, hardware: Hardware) -> NumberFormat:
    if FLOAT8 not in hardware.product_flops:
        formats = ", ".join(hardware.product_flops)
        raise UsageError(f"--precision {FLOAT8}: {hardware.name} has products in {formats} alone")
    return dataclasses.replace(number_format, name=f"{number_format.name} with {FLOAT8}", products=FLOAT8)


def _configuration(path: Path, given: str) -> dict[str, Any]:
    """Read a file of JSON that maps names to values."""
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--config-json {given} is no JSON file: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--config-json {given}: no mapping of names to values")
    return config


def _recorded(parsed: argparse.Namespace, progress: Progress) -> tuple[ModelCosts, NumberFormat, int, str]:
    progress.phase(IMPORTING)
    made, config = configured(parsed)
    from lightning_hybrid.step.deferred_init.parameters import parameters_on_meta  # late: torch takes seconds

    precision = parsed.precision or config.precision or "32-true"
    progress.phase("making the module, without storage for its parameters, and its data")
    try:
        recorded = _record(made, _recorded_precision(precision), progress, parameters_on_meta())
    except Exception as error:
        if not reads_storage(error):
            raise
        progress.phase("making the module in full, whose code reads values of parameters")
        recorded = _record(made, _recorded_precision(precision), progress, contextlib.nullcontext())
    return recorded.costs, recorded.number_format, recorded.samples, precision


def _record(
    made: ConfiguredRun, precision: str, progress: Progress, building: contextlib.AbstractContextManager[None]
) -> RecordedCosts:
    import torch

    from lightning_hybrid.planning.costs import record_costs
    from lightning_hybrid.verify.experiment import fit_arguments, namespace_of

    torch.manual_seed(0)
    with building:
        module, data = made.make_module(), made.make_data()
    lightning = namespace_of(module)
    return record_costs(lightning, module, fit_arguments(lightning, data), precision, progress.phase)


def _planned(parsed: argparse.Namespace, request: _Request, progress: Progress) -> PlannedRun:
    costs, number_format, samples, precision = _model(parsed, progress)
    allowed = Allowed(chunked_loss=True)
    if precision == FLOAT8:
        number_format = _in_float8(number_format, request.hardware)
        allowed = Allowed(chunked_loss=True, tensor=False, context=False, spatial=False, expert=False)
    if request.measured is not None:
        costs = corrected_by(costs, number_format, request.hardware, request.measured, str(parsed.measured))
    for flag, fields in (("--fix", request.fixed), ("--why", fixed_fields(request.explained or {}))):
        sharded = (name for name in ("tensor", "context", "expert") if fields.get(name, 1) > 1 and precision == FLOAT8)
        shards = (f"float8 scales whole tensors, which {name} ranks would shard" for name in sharded)
        if reason := next(itertools.chain(shards, misfits(costs, fields, parsed.devices * parsed.num_nodes)), ""):
            raise UsageError(f"{flag} {parsed.fix if flag == '--fix' else parsed.why}: {reason}")
    progress.phase("searching layouts")
    result = search_layouts(
        costs,
        number_format,
        request.hardware,
        parsed.devices,
        parsed.num_nodes,
        batch=parsed.batch or samples,
        is_replica_batch=parsed.batch is None,
        objective=parsed.objective,
        max_memory=request.max_memory,
        fixed=request.fixed,
        allowed=allowed,
    )
    cluster = cluster_of(request.hardware, parsed.devices, parsed.num_nodes, request.max_memory)
    return PlannedRun(result, costs, number_format, cluster, parsed.devices, parsed.num_nodes, precision)


def _measured(path: Path) -> MeasuredCosts:
    with usage_errors():
        try:
            return load_measured_costs(path)
        except OSError as error:
            raise UsageError(
                f"--measured {path}: {error.strerror}; give {FILE_NAME} of a run, or its folder"
            ) from error


def _options(text: str, flag: str) -> dict[str, Any]:
    from lightning_hybrid.verify.layouts import parse_layout  # loads torch

    with usage_errors():
        try:
            options = dict(parse_layout(text.replace(" ", ",") if "{" not in text else text).strategy)
        except ValueError as error:
            raise UsageError(str(error).replace("--layout", flag)) from error
        try:
            check_options(options)
        except ValueError as error:
            raise UsageError(f"{flag} {text}: {error}") from error
    return options


def _explained(parsed: argparse.Namespace, options: dict[str, Any], planned: PlannedRun) -> Plan:
    """Predict the layout of ``--why`` on the cluster."""
    best = planned.result.best.layout
    ranks = parsed.devices * parsed.num_nodes
    try:
        layout = layout_from_options(options, ranks, best.batch, microbatch=best.microbatch)
        if layout.ranks != ranks:
            raise UsageError(f"--why {parsed.why}: {layout.ranks} ranks do not fill {ranks} devices")
        if parsed.batch is None:  # each replica has the loader's batch
            batch = best.batch // best.data * layout.data
            layout = layout_from_options(options, ranks, batch, microbatch=best.microbatch)
        elif parsed.batch % layout.data:
            raise UsageError(f"--why {parsed.why}: {layout.data} replicas do not divide --batch {parsed.batch}")
        _check_microbatches(layout, options, f"--why {parsed.why}")
        return predict_plan(planned.costs, layout, planned.number_format, planned.hardware)
    except HybridError as error:
        raise UsageError(f"--why {parsed.why}: {error}") from error


def _check_microbatches(layout: PlanLayout, options: Mapping[str, Any], given: str) -> None:
    """Refuse more microbatches than a replica has samples."""
    count, samples = options.get("num_microbatches"), layout.batch // layout.data
    if isinstance(count, int) and count > samples:
        raise UsageError(f"{given}: {count} microbatches of {counted(samples, 'sample')}, which a replica has")
