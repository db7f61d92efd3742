"""Launchers of ranks: of the script again, and of forks, after which the process that forked knows what they did."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import DistNetworkError
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lightning_hybrid.errors import add_error_note
from lightning_hybrid.mesh import is_lost_connection
from lightning_hybrid.strategies.world.traces import shorten, trim

# The results that Lightning's own launcher returns are the weights, `callback_metrics`, and one `best_model_path`.
_METRICS = ("logged_metrics", "progress_bar_metrics")
_SECONDS_TO_REPORT = 5.0
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the script once per rank, and leaves the first rank time to report why another one failed."""

    def __init__(self, strategy: Any, environment: ClusterEnvironment) -> None:
        """Set up for the ranks of one strategy."""
        super().__init__(environment, strategy.num_processes, strategy.num_nodes)
        self.strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """Lightning asks in notebooks alone, and would advise another strategy.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "a notebook cannot be started once per device: set Hybrid3DStrategy(..., start_method='fork'), or"
            " strategy='hybrid3d_notebook'"
        )

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the ranks, after a look at what would end all of them.

        Raises:
            RuntimeError: The program is no file that could be started again, or another process has the port.
        """
        self.strategy.check_before_ranks(function, *args, **kwargs)
        self._check_script()
        try:
            return super().launch(function, *args, **kwargs)
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            self.kill(signal.SIGTERM)  # the others would wait for this rank
            port = self.cluster_environment.main_port
            raise RuntimeError(f"port {port} is in use; set MASTER_PORT to a free one, or leave it unset") from None

    def _check_script(self) -> None:
        if not self.cluster_environment.creates_processes_externally and sys.argv[0] in ("-", "-c", ""):
            raise RuntimeError(
                f"{self.num_processes} devices: each rank starts the script again, but this program came from"
                f" {'python -c' if sys.argv[0] == '-c' else 'standard input'}; save it as a .py file, or set"
                " Hybrid3DStrategy(..., start_method='fork')"
            )

    def _call_children_scripts(self) -> None:
        # Else ranks that lose the store print frames of its C++ code, above the line that says which rank has died.
        is_set = _LOG_LEVEL in os.environ
        os.environ.setdefault(_LOG_LEVEL, "ERROR")
        try:
            super()._call_children_scripts()
        finally:
            if not is_set:
                del os.environ[_LOG_LEVEL]
        self.procs: Any = [_Child(process) for process in self.procs]


class _Child:
    """A rank's process, seen as running until some seconds after it was found to have failed.

    Lightning looks every five seconds for processes that failed, and then kills this one at once: it would not get to
    say which rank failed and why if the other one failed just before.
    """

    def __init__(self, process: Popen[bytes]) -> None:
        self._process = process
        self._report_until: float | None = None
        self.pid = process.pid
        self.returncode: int | None = None
        self.send_signal = process.send_signal

    def poll(self) -> int | None:
        code = self._process.poll()
        now = time.monotonic()
        if code and self._report_until is None:
            self._report_until = now + _SECONDS_TO_REPORT
        if self._report_until is None or now >= self._report_until:
            self.returncode = code
        return self.returncode


class ForkedRanksLauncher(_MultiProcessingLauncher):
    """Forks the ranks, and returns the progress of the loops, logged values and paths of checkpoints from the first."""

    _errors = Path()  # where ranks leave theirs

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Fork the ranks, after a look at what would end all of them; an error of a rank is raised as itself."""
        strategy: Any = self._strategy
        strategy.check_before_ranks(function, *args, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            self._errors = Path(folder)
            error: Exception
            try:
                return super().launch(function, *args, **kwargs)
            except ProcessRaisedException as failure:
                error = self._first_error() or failure
            except ProcessExitedException as failure:  # killed, or out of memory
                error = failure
        shorten(error)
        raise error

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        _print_no_native_warnings()
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
        except Exception as error:
            note = f"raised on rank {process_idx}:\n{''.join(traceback.format_tb(trim(error).__traceback__))}"
            with contextlib.suppress(Exception):  # an error that cannot be pickled arrives as text
                content = is_lost_connection(error), process_idx, error, note.rstrip()
                (self._errors / f"{process_idx}.part").write_bytes(pickle.dumps(content))
                (self._errors / f"{process_idx}.part").rename(self._errors / str(process_idx))
            raise

    def _first_error(self) -> Exception | None:
        """Return the error of a rank, rather one that failed by itself than one that lost its connection to it."""
        found = []
        for path in self._errors.glob("*[0-9]"):
            with contextlib.suppress(Exception):
                found.append(pickle.loads(path.read_bytes()))
        if not found:
            return None
        _, _, error, note = min(found, key=lambda each: each[:2])
        add_error_note(error, note)
        return error

    @property
    def has_run(self) -> bool:
        """Whether this process has forked ranks, which have ended."""
        return bool(self.procs)

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Collect on the first rank what Lightning collects, and the progress of a fit."""
        results: dict[str, Any] = {name: getattr(trainer, name) for name in _METRICS}
        results["checkpoints"] = [callback.state_dict() for callback in _model_checkpoints(trainer)]
        if trainer.state.fn == TrainerFn.FITTING:
            results["progress"] = trainer.fit_loop.state_dict()
        # Lightning too sends bytes: the shared memory of a tensor would be gone with the rank.
        buffer = io.BytesIO()
        torch.save(results, buffer)
        return {**super().get_extra_results(trainer), "hybrid3d": buffer.getvalue()}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """Assign the results to the Trainer and the callbacks of the process that forked the ranks."""
        super().update_main_process_results(trainer, extra)
        results = torch.load(io.BytesIO(extra["hybrid3d"]), map_location="cpu", weights_only=False)
        for name in _METRICS:
            getattr(trainer, name).update(results[name])
        for callback, state in zip(_model_checkpoints(trainer), results["checkpoints"], strict=True):
            callback.dirpath = state["dirpath"]  # a callback with another folder would ignore most of its state
            callback.load_state_dict(state)
        if "progress" in results:
            trainer.fit_loop.load_state_dict(results["progress"])
            trainer.fit_loop.restarting = False


def _print_no_native_warnings() -> None:
    """Let torch's C++ code log errors alone, as in ranks of `ScriptLauncher`, unless the environment sets a level.

    A fork has loaded torch already, which reads the level when it is loaded.
    """
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    with contextlib.suppress(OSError, AttributeError):  # a build with other names prints them
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))._ZN3c1011initLoggingEv()


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
