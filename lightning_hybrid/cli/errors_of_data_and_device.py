"""Errors of commands that run the user's code in one process on the CPU: what to pass instead, without a traceback.

A command records a step on a batch, so it needs training data; and it has no GPU. Other errors of the user's code are
raised as they are.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence

from lightning_hybrid.cli.exit_status_and_json_output import UsageError
from lightning_hybrid.errors import HybridError

_DATA = (
    "a step is recorded on one batch of training data: pass --data path.to:DataModule, or --data path.to:function of a"
    " function that makes loaders (--help)"
)
_NO_CUDA = ("not compiled with CUDA", "no NVIDIA driver", "No CUDA GPUs", "no CUDA-capable device")
# Functions through which an error comes whose cause is the data.
_READS_DATA = ("take_example", "prepare_data")


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
