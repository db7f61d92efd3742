"""The module, the data and the layout of a command line, for the commands that run or record a step of the module.

Commands that record a step in this process, on the CPU, need training data, and have no GPU: errors of these say what
to pass instead, without a traceback. A step that cannot be run under a layout is a result, with its reason. Other
errors of the user's code are raised as they are.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import math
import os
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hybrid.cli.classes import ConfiguredRun, section
from lightning_hybrid.cli.command import PRECISIONS, UsageError, usage_errors
from lightning_hybrid.cli.progress import Progress
from lightning_hybrid.errors import HybridError
from lightning_hybrid.text import WIDTH, columns, print_table, sized

if TYPE_CHECKING:
    from lightning_hybrid.verify import Layout

IMPORTING = "importing torch, Lightning and your module"
STATUSES = """exit status: 0 the step can be run under the layout; 2 invalid command line; 3 it cannot: the reason is
printed, with the traceback if it is an error of your step. Other errors of your code give their traceback and 1"""

_DATA = (
    "a step is recorded on one batch of training data: pass --data path.to:DataModule, or --data path.to:function of a"
    " function that makes loaders (--help)"
)
# Kinds of memory of a rank, and the titles of their columns.
_KINDS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer_states": "optimizer",
    "activations": "activations",
    "gathered": "gathered",
    "working": "working",
    "messages": "messages",
    "total": "total",
}
_NO_CUDA = ("not compiled with CUDA", "no NVIDIA driver", "No CUDA GPUs", "no CUDA-capable device")
# Functions through which an error comes whose cause is the data.
_READS_DATA = ("take_example", "prepare_data")
# Arguments of the Trainer that change the numbers of a step, and that a verification can take over.
_TAKEN = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "use_distributed_sampler")
# Others that the commands read, or choose themselves, or that change no numbers.
_IGNORED = ("strategy", "devices", "num_nodes", "accelerator", "precision", "default_root_dir")
_IGNORED_KINDS = ("enable_", "limit_", "log", "max_", "min_")


# -- arguments of the command line -------------------------------------------------------------------------------------


def add_classes_to(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the user's classes."""
    parser.add_argument(
        "module",
        nargs="?",
        help="path.to:Module, FILE.py:Module, or a script FILE.py that calls LightningCLI; none if a config names it",
    )
    parser.add_argument("--data", help="path.to:DataModule, or a function that makes loaders; the module's own if none")
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="of LightningCLI; repeatable")


def add_precision_to(
    parser: argparse.ArgumentParser, default_words: str, default: str | None = None, more: Sequence[str] = ()
) -> None:
    """Add ``--precision``, with the names that Lightning knows, and more."""
    parser.add_argument(
        "--precision",
        choices=(*PRECISIONS, *more),
        metavar="PRECISION",
        default=default,
        help=f"as Lightning spells it ({default_words})",
    )


def add_tensor_plan_to(parser: argparse.ArgumentParser) -> None:
    """Add the argument for entries of a plan for tensor ranks."""
    parser.add_argument(
        "--tensor-plan", action="append", metavar="'*.up_proj=colwise'", help="of layouts with tp=; repeat for several"
    )


def add_layout_to(parser: argparse.ArgumentParser, example: str) -> None:
    """Add the arguments that name the user's classes, a layout, and the precision."""
    add_classes_to(parser)
    parser.add_argument("--layout", metavar=example, help="(config's or pp=2)")
    add_tensor_plan_to(parser)
    add_precision_to(parser, "config's or 32-true")


def configured(parsed: argparse.Namespace) -> tuple[ConfiguredRun, TrainerConfig]:
    """Return what makes the classes of a command line, and what its config says of the run; the classes are imported.

    Raises:
        UsageError: A path, an argument or a config file is wrong.
    """
    flags = [*(f"--config={path}" for path in parsed.config), *parsed.class_flags]
    run = ConfiguredRun(parsed.module, parsed.data, flags)
    return run, trainer_config(run.parse())


def layout_and_classes(parsed: argparse.Namespace, progress: Progress) -> tuple[Layout, ConfiguredRun, str, int]:
    """Return what a command line names, or its config: the layout, what makes the classes, precision, nodes."""
    check_names(parsed.layout or "pp=2", parsed.tensor_plan)
    progress.phase(IMPORTING)
    made, config = configured(parsed)
    # After the classes: they decide which Lightning the process has, and a layout is checked with its strategy.
    if parsed.layout is None and config.layout:
        layout, num_nodes = checked(config.layout), config.num_nodes
    else:  # the config's devices and nodes are those of its own layout
        layout, num_nodes = layout_of(parsed.layout or "pp=2", parsed.tensor_plan), 1
    return layout, made, parsed.precision or config.precision or "32-true", num_nodes


def check_names(text: str, tensor_plan: list[str] | None) -> None:
    """Check a layout as far as its text tells, before the imports, which take seconds.

    Raises:
        UsageError: It names something else than options, or has an entry without a value.
    """
    from lightning_hybrid.strategies.options.foreign import refuse_foreign
    from lightning_hybrid.verify.layouts import parse_layout

    try:
        with usage_errors():
            given, own = parse_layout(text, tensor_plan or ()).strategy, _option_names()
            refuse_foreign({name: value for name, value in given.items() if name not in own}, own)
    except TypeError as error:
        raise UsageError(
            f"--layout {text!r}: {error}; short names are dp, tp, pp, cp, ep, spatial, stages, m, zero"
        ) from error


def _option_names() -> list[str]:
    """The names of the strategy's arguments, from its file: an import of it imports torch."""
    content = (Path(__file__).parents[1] / "strategies" / "hybrid3d.py").read_text(encoding="utf-8")
    functions = (each for each in ast.walk(ast.parse(content)) if isinstance(each, ast.FunctionDef))
    arguments = next(each.args for each in functions if each.name == "__init__")
    return [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]


def layout_of(text: str, tensor_plan: list[str] | None) -> Layout:
    """Parse a layout whose names are checked, and check its values.

    Raises:
        UsageError: An option does not take its value.
    """
    from lightning_hybrid.verify.layouts import parse_layout

    with usage_errors():
        return checked(parse_layout(text, tensor_plan or ()))


def checked(layout: Layout) -> Layout:
    """Return the layout, whose values the strategy takes.

    Raises:
        UsageError: It does not take one, whatever the module is.
    """
    from lightning_hybrid.strategies.hybrid3d import Hybrid3DStrategy

    with usage_errors():
        Hybrid3DStrategy(**layout.options(None))
    return layout


# -- a config of LightningCLI ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainerConfig:
    """The parts of a config that ``verify`` and ``explain`` use."""

    layout: Layout | None = None  # the layout of its strategy; None if it names another strategy, or none
    num_nodes: int = 1  # the nodes of that layout
    seed: int | None = None  # its ``seed_everything``, where that is a number
    precision: str | None = None  # its precision; None if it names none
    arguments: Mapping[str, Any] = field(default_factory=dict)  # arguments of the Trainer that are taken over
    unused: tuple[str, ...] = ()  # names of further arguments of the Trainer that it sets and that may change numbers


def trainer_config(cli: Any) -> TrainerConfig:
    """Read the config that a LightningCLI has parsed.

    Raises:
        UsageError: The layout does not have these sizes, or is that of a class derived from ``Hybrid3DStrategy``.
    """
    trainer = section(cli, "trainer").as_dict()
    defaults = inspect.signature(cli.trainer_class).parameters
    given = {name: value for name, value in trainer.items() if name in defaults and value != defaults[name].default}
    seed, precision = section(cli, "seed_everything"), given.get("precision")
    return TrainerConfig(
        layout=_layout(cli, given),
        num_nodes=given.get("num_nodes", 1),
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else None,
        precision=None if precision is None else str(precision),
        arguments={name: value for name, value in given.items() if name in _TAKEN},
        unused=tuple(n for n in given if n not in (*_TAKEN, *_IGNORED) and not n.startswith(_IGNORED_KINDS)),
    )


def _layout(cli: Any, given: Mapping[str, Any]) -> Layout | None:
    """Return the layout of the config's strategy and devices."""
    from lightning_hybrid.strategies.hybrid3d import OPTION_DEFAULTS
    from lightning_hybrid.strategies.options.foreign import refuse_foreign
    from lightning_hybrid.verify.layouts import layout_of_options

    options = _strategy_options(given.get("strategy"))
    if options is None:
        return None
    with usage_errors():
        refuse_foreign({name: options[name] for name in options if name not in OPTION_DEFAULTS}, OPTION_DEFAULTS)
        changed = {name: value for name, value in options.items() if value != OPTION_DEFAULTS[name]}
        return layout_of_options(changed, _num_devices(given))


def _strategy_options(strategy: Any) -> dict[str, Any] | None:
    """Return the options of a strategy of this package by its class path or registered name; None if it is another."""
    from lightning.pytorch.strategies import StrategyRegistry

    if isinstance(strategy, str):
        is_registered = strategy.startswith("hybrid3d") and strategy in StrategyRegistry
        return dict(StrategyRegistry[strategy]["init_params"]) if is_registered else None
    if not isinstance(strategy, Mapping):
        return None
    path = str(strategy.get("class_path"))
    if path.startswith("lightning_hybrid.") and path.endswith(".Hybrid3DStrategy"):
        return dict(strategy.get("init_args") or {})
    if path.startswith(("lightning.", "pytorch_lightning.")):
        return None
    raise UsageError(f"trainer.strategy: {path} is not lightning_hybrid.Hybrid3DStrategy; name a layout with --layout")


def _num_devices(given: Mapping[str, Any]) -> int | None:
    """Return the number of ranks that the config names; None if it depends on the machine."""
    devices = given.get("devices", "auto")
    if isinstance(devices, str) and devices.isdecimal():
        devices = int(devices)
    elif isinstance(devices, list):
        devices = len(devices)
    nodes = given.get("num_nodes", 1)
    return math.prod((devices, nodes)) if isinstance(devices, int) and devices > 0 else None


# -- a step that is recorded in this process ---------------------------------------------------------------------------


@contextlib.contextmanager
def data_and_device_errors() -> Iterator[None]:
    """Turn errors inside about missing data, hooks of Lightning, and GPUs into a ``UsageError``."""
    try:
        yield
    except (UsageError, HybridError):
        raise
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        raise UsageError(message) from error


def reads_storage(error: Exception) -> bool:
    """Whether code of the user has read values of parameters that have no storage."""
    return isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error).lower()


def _message(error: Exception) -> str | None:
    """Return what is said of an error; None if its traceback says more."""
    frames = traceback.extract_tb(error.__traceback__)
    kind, text = type(error).__name__, str(error).strip().partition("\n")[0]
    if any(words in str(error) for words in _NO_CUDA):
        return (
            f"{_line_of_user(frames)} uses a CUDA device, and there is none in this process, which runs the module on"
            f" the CPU: {text}; write self.device or the device of the batch instead, and leave moving the module to"
            " the Trainer"
        )
    if kind == "MisconfigurationException":
        return f"{text}; {_DATA}" if "dataloader" in text else text
    if any(frame.name in _READS_DATA for frame in frames):
        return f"there is no training data ({_line_of_user(frames)}: {kind}: {text}); {_DATA}"
    if frames and frames[-1].name == "namespace_of":
        return text
    return None


def _line_of_user(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost file and line of code of neither this package nor an installed one."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    others = (*(path + os.sep for path in (package, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))), "<")
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    frame = (own or list(frames))[-1]
    return f"{os.path.relpath(frame.filename)}:{frame.lineno} in {frame.name}"


@contextlib.contextmanager
def refusals(layout: Layout, content: dict[str, Any]) -> Iterator[None]:
    """Put the refusal of a layout into the content that is printed; an error of another kind is raised as it is."""
    from lightning_hybrid.verify.record import describe_failure

    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if not describe_failure(error, steps_done=0).refused:
            raise
        content.clear()
        content.update(layout=layout.name, refused=f"{type(error).__name__}: {error}")


def print_memory(head: Sequence[str], ranks: Mapping[Any, Mapping[str, int | None]], places: Mapping[str, str]) -> None:
    """Print a table of estimated bytes by kind; with three digits and a unit where lines of all digits are too long.

    Args:
        head: The title of the table, and titles of the further cells that name a rank.
        ranks: The bytes of each rank, by the cells that name it.
        places: Where a kind is, if not in memory of the compute device.
    """
    kinds = {**_KINDS, "host_total": "host"} if "cpu" in places.values() else _KINDS
    away = ", ".join(f"{kinds[kind]} on {place}" for kind, place in places.items())
    exact: list[tuple[str, ...]] = [("", *head[1:], *kinds.values())]
    short = list(exact)
    for cells, sizes in ranks.items():
        numbers = [sizes[kind] for kind in kinds]
        exact.append((*cells, *("unknown" if number is None else f"{number:,}" for number in numbers)))
        short.append((*cells, *("unknown" if number is None else sized(number) for number in numbers)))
    print(head[0] + (f" ({away})" if away else ""))
    print_table(exact if max(map(len, columns(exact))) <= WIDTH else short)
