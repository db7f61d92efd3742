"""The child side of a world: one rank, which runs tasks until its world ends.

A task names a function of a test module; the rank loads that module, calls the function inside a fresh process group,
and reports its outcome. `worlds_plugin.py` is the parent side.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import sys
import threading
import traceback
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType

import numpy as np
import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import rewrite_asserts
from _pytest.outcomes import Skipped
from lightning.fabric.utilities import registry
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from harness.worlds import leaked_patches
from harness.worlds.world_messages import STOP_SIGNAL, Idle, Report, Stop, Task, output_path, stack_path

# The parent stops a world that takes too long, and shows where each rank hangs; a timeout inside gloo would come first.
_NEVER = datetime.timedelta(days=1)


def serve(rank: int, world_size: int, folder: str, connection: Connection) -> None:
    """Run tasks until the parent sends `Stop` or closes the connection.

    Args:
        rank: the rank of this process.
        world_size: the number of ranks.
        folder: a directory that the ranks of this world share.
        connection: brings tasks, takes reports.
    """
    _die_with_parent()
    stack_file = stack_path(folder, rank).open("w")
    rank_zero_only.rank = rank
    # A process of a server inherits "forkserver": the workers of a data loader would load torch anew in every test.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    # Every Trainer would read the metadata of all installed packages, which takes longer than a small fit's step.
    registry.entry_points = functools.cache(registry.entry_points)
    gc.freeze()  # what the server loaded never becomes garbage; the collection after each task may skip it
    connection.send("ready")
    while True:
        try:
            message: Task | Idle | Stop = connection.recv()
        except EOFError:
            return
        if isinstance(message, Stop):
            return
        if isinstance(message, Idle):
            _leave_process_group()
            continue
        task = message
        # Anew for each task: a Trainer puts back, for every signal, the handler that Python knows of, and so removes
        # this one.
        faulthandler.unregister(STOP_SIGNAL)
        faulthandler.register(STOP_SIGNAL, file=stack_file, chain=True)
        scratch = Path(folder) / f"task-{task.number}"
        scratch.mkdir(exist_ok=True)
        with _environment(rank, world_size, task.main_port), _output(folder, rank, task.capture):
            os.chdir(scratch)
            _reset_global_state()
            report = _run(rank, world_size, scratch, task)
            os.chdir(folder)
        connection.send(report)


def _run(rank: int, world_size: int, scratch: Path, task: Task) -> Report:
    try:
        _load(task.module_name, task.module_path)
        function, arguments, keywords = pickle.loads(task.call)
        # Only a file: no port is open on any interface but loopback, and two sessions cannot meet.
        store = dist.FileStore(str(scratch / "store"), world_size)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=_NEVER)
        result = pickle.dumps(function(*arguments, **keywords))
        leaked_patches.check()
        return Report("passed", result=result)
    except Skipped as skipped:
        return Report("skipped", text=str(skipped))
    except BaseException as error:
        return Report("failed", text=_traceback_from(task.module_path, error))


def _traceback_from(path: str, error: BaseException) -> str:
    """The traceback without the frames of this file, which only run the task."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _load(name: str, path: str) -> None:
    """Make the module of a task importable by the name that pytest gave it; its folder is no package."""
    if name in sys.modules:
        return
    if not Path(path).name.startswith("test_"):
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, path, loader=_AssertionLoader(name, path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


class _AssertionLoader(SourceFileLoader):
    """Loads a test module with pytest's assertions, which show the values that they compared."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


@contextlib.contextmanager
def _environment(rank: int, world_size: int, main_port: int) -> Iterator[None]:
    """The variables that torchrun sets: Lightning then knows that it was launched and starts no processes itself."""
    before = dict(os.environ)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(main_port),
        TORCHELASTIC_RUN_ID="worlds",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _output(folder: str, rank: int, capture: bool) -> Iterator[None]:
    """Send what the task prints, from C++ too, to a file of this rank that starts empty."""
    if not capture:
        yield
        return
    kept = [os.dup(1), os.dup(2)]
    with output_path(folder, rank).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, original in enumerate(kept, start=1):
            os.dup2(original, stream)
            os.close(original)


def _reset_global_state() -> None:
    """Reset global state, so that no task depends on the one before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # Sub-groups hang on reference cycles of meshes; without this their threads and sockets pile up.
    gc.collect()
    # What remains are modules and caches, which live on: later collections may skip them.
    gc.freeze()


def _die_with_parent() -> None:
    """End this process when pytest ends for any reason: a rank that hangs in gloo would never exit."""
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, name="die-with-parent", daemon=True).start()
