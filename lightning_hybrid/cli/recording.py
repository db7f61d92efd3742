"""What commands share that record a step of the user's module in this process, on the CPU.

They need training data, and have no GPU: errors of these say what to pass instead, without a traceback. A step that
cannot be run under a layout is a result, with its reason. Other errors of the user's code are raised as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_hybrid.cli.classes import ConfiguredRun
from lightning_hybrid.cli.command import UsageError
from lightning_hybrid.cli.progress import Progress
from lightning_hybrid.cli.verify import (
    add_classes_to,
    add_precision_to,
    add_tensor_plan_to,
    checked,
    configured,
    layout_of,
)
from lightning_hybrid.errors import HybridError

if TYPE_CHECKING:
    from lightning_hybrid.verify import Layout

STATUSES = """exit status: 0 the step can be run under the layout; 2 invalid command line; 3 it cannot: the reason is
printed, with the traceback if it is an error of your step. Other errors of your code give their traceback and 1"""

_DATA = (
    "a step is recorded on one batch of training data: pass --data path.to:DataModule, or --data path.to:function of a"
    " function that makes loaders (--help)"
)
_NO_CUDA = ("not compiled with CUDA", "no NVIDIA driver", "No CUDA GPUs", "no CUDA-capable device")
# Functions through which an error comes whose cause is the data.
_READS_DATA = ("take_example", "prepare_data")


def add_layout_to(parser: argparse.ArgumentParser, example: str) -> None:
    """Add the arguments that name the user's classes, a layout, and the precision."""
    add_classes_to(parser)
    parser.add_argument("--layout", metavar=example, help="(config's or pp=2)")
    add_tensor_plan_to(parser)
    add_precision_to(parser, "config's or 32-true")


def layout_and_classes(parsed: argparse.Namespace, progress: Progress) -> tuple[Layout, ConfiguredRun, str]:
    """Return the layout, what makes the classes, and the precision that a command line names, or its config."""
    progress.phase("importing the classes")
    made, config = configured(parsed)
    # After the classes: they decide which Lightning the process has, and a layout is checked with its strategy.
    if parsed.layout is None and config.layout:
        layout = checked(config.layout)
    else:
        layout = layout_of(parsed.layout or "pp=2", parsed.tensor_plan)
    return layout, made, parsed.precision or config.precision or "32-true"


def refusal(layout: Layout, error: Exception) -> dict[str, Any]:
    """Return the content of a layout that is refused; an error of another kind is raised again."""
    from lightning_hybrid.verify.records.record import describe_failure

    if not describe_failure(error, steps_done=0).refused:
        raise error
    return {"layout": layout.name, "refused": f"{type(error).__name__}: {error}"}


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
