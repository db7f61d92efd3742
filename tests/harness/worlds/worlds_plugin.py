"""Tests on several ranks: worlds of gloo processes that live across tests. This is the parent side, in pytest.

Two uses of a world:

    @pytest.mark.world(4)                     the body runs on four ranks; values of fixtures are sent to them
    def test_sum(): ...

    def test_parity(worlds):                  the test stays here and compares what functions on ranks return
        [expected] = worlds.run(1, train)
        assert worlds.run(4, train)[0] == expected

Ranks are forked from a server that has torch and Lightning loaded, never from pytest: forking a process that has run
torch operations hangs. A world that failed is restarted, since its ranks may be in any state.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from harness.worlds.steal_time import seconds_without_steal
from harness.worlds.world_messages import STOP_SIGNAL, Idle, Report, Stop, Task, output_path, stack_path

DEFAULT_TIMEOUT = 60.0
START_TIMEOUT = 180.0
# After the first failure: how long the other ranks may take to report too, before they count as still running.
# Also how long an interrupted rank may take to write its stack.
GRACE = 5.0
SHOWN_OUTPUT_CHARS = 10_000
SETS = 8  # into which the parameters of a test on ranks are divided
PARTS = 6  # into which all tests on ranks are divided

PRELOADED = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "harness.worlds.light_torchmetrics",
    "lightning.pytorch",
    # Imports of nearly every fit on every rank. Not under coverage: imports here are not measured.
    *([] if "coverage" in sys.modules else ["lightning_hybrid.strategies.hybrid3d"]),
    "torch._inductor.compile_fx",  # where layers are compiled, with any backend
    "harness.worlds.light_transformers",  # the models of most fits; what is not installed is passed over
    "pytest",  # ranks import pytest's main module, as multiprocessing's children always do, and test modules
]


class RankError(Exception):
    """A task failed on a rank, or did not end on all ranks."""


class Worlds:
    """The worlds of a test session, one for each size, started when first needed."""

    def __init__(self, *, capture: bool) -> None:
        self._capture = capture
        self._by_size: dict[int, _World] = {}
        self._references: dict[tuple[int, bytes], bytes] = {}

    def run(
        self,
        n: int,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT,
        grace: float = GRACE,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a function on every rank of a world.

        Args:
            n: the number of ranks; 1 is the one-process reference.
            function: a function at the top of a module.
            args: its arguments; they and the results must be picklable.
            timeout: seconds until the ranks are stopped.
            grace: seconds that the other ranks have to report their failures after the first one.
            kwargs: its keyword arguments.

        Returns:
            What each rank returned, by rank.

        Raises:
            RankError: a rank raised, died, or took too long; says which, with traceback and output.
        """
        module = inspect.getmodule(function)
        assert module is not None and module.__file__ is not None, f"{function} comes from no module file"
        try:
            call = pickle.dumps((function, args, kwargs))
        except Exception as error:
            raise TypeError(
                f"{function} or one of its arguments cannot be sent to a rank: {error}; use a function at the top of "
                "its module and picklable arguments, and make everything else inside it"
            ) from error
        world = self._by_size.get(n) or self._by_size.setdefault(n, _World(n))
        try:
            reports = world.run(
                module.__name__, module.__file__, call, timeout=timeout, grace=grace, capture=self._capture
            )
        except BaseException:
            self._by_size.pop(n).kill()
            raise
        skipped = [report.text for report in reports if report.outcome == "skipped"]
        if skipped:
            pytest.skip(skipped[0])
        return [pickle.loads(report.result) for report in reports]

    def run_once(self, n: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Return what `run` returns, from an earlier call with equal arguments if there was one.

        For a reference that several tests compare with.
        """
        key = n, pickle.dumps((function, args, kwargs))
        if key not in self._references:
            self._references[key] = pickle.dumps(self.run(n, function, *args, **kwargs))
        return pickle.loads(self._references[key])

    def stop(self) -> None:
        """End all worlds."""
        for world in self._by_size.values():
            world.stop()
        self._by_size.clear()


class _World:
    """The ranks of one world and the connections to them."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a world needs at least 1 rank, not {size}")
        self.size = size
        self._num_tasks = 0
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        self._connections: list[Connection] = []
        self._processes = []
        context = get_context("forkserver")
        start_server()
        for index in range(size):
            parent_end, child_end = context.Pipe()
            # Not daemons: a data loader inside a rank may start processes.
            process = context.Process(target=_serve, args=(index, size, self._folder.name, child_end))
            process.start()
            child_end.close()
            self._connections.append(parent_end)
            self._processes.append(process)
        for index, connection in enumerate(self._connections):
            try:
                started = connection.poll(START_TIMEOUT) and connection.recv() == "ready"
            except EOFError:
                started = False
            if not started:
                self.kill()
                raise RankError(f"rank {index} of {size} did not start; its output is above")

    def run(
        self, module_name: str, module_path: str, call: bytes, *, timeout: float, grace: float, capture: bool
    ) -> list[Report]:
        """Run one task on all ranks and return their reports; raises `RankError` and is of no use afterwards."""
        task = Task(self._num_tasks, module_name, module_path, call, _free_port(), capture)
        self._num_tasks += 1
        self._send(task)
        reports: dict[int, Report] = {}
        bad: list[int] = []
        end = seconds_without_steal() + timeout
        while len(reports) < self.size and (left := end - seconds_without_steal()) > 0:
            running = {self._connections[i]: i for i in range(self.size) if i not in reports}
            ready = wait(list(running), left)
            for connection in ready:
                index = running[connection]
                reports[index] = self._receive(index)
                if reports[index].outcome == "failed":
                    end = min(end, seconds_without_steal() + grace) if not bad else end
                    bad.append(index)
        if bad or len(reports) < self.size:
            raise RankError(self._describe(reports, bad, timeout))
        self._send(Idle())
        return [reports[index] for index in range(self.size)]

    def stop(self) -> None:
        """Let the ranks, which are idle, end by themselves, so that coverage can be written."""
        self._send(Stop())
        end = time.monotonic() + GRACE
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the ranks in any state."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()

    def _send(self, message: object) -> None:
        for connection in self._connections:
            try:
                connection.send(message)
            except BrokenPipeError:
                continue  # a rank that died is found when its report is awaited

    def _receive(self, index: int) -> Report:
        try:
            return self._connections[index].recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[index]
            process.join(GRACE)
            return Report("failed", text=f"the process died (exit code {process.exitcode})\n")

    def _describe(self, reports: dict[int, Report], bad: list[int], timeout: float) -> str:
        running = [index for index in range(self.size) if index not in reports]
        if bad:
            text = f"rank {bad[0]} of {self.size} failed first:\n\n{reports[bad[0]].text}"
        else:
            text = f"timeout: {len(running)} of {self.size} ranks still running after {timeout:g} s\n"
        for index in bad[1:]:
            text += f"\nrank {index} failed too: {reports[index].text.splitlines()[-1]}"
        text += f"\nranks still running: {', '.join(map(str, running)) or 'none'}\n"
        self._interrupt(running)
        for index in running:
            text += f"\nrank {index} was at (innermost call first):\n{self._stack(index)}"
        for index in bad[:1] or running:
            output = self._output(index)
            text += f"\noutput of rank {index}:\n{output}" if output else ""
        return text

    def _interrupt(self, running: list[int]) -> None:
        """Stop ranks inside their task, all before any is awaited: the end of one would move the others."""
        for index in running:
            pid = self._processes[index].pid
            assert pid is not None
            if self._processes[index].is_alive():
                os.kill(pid, STOP_SIGNAL)
        end = time.monotonic() + GRACE
        for index in running:
            self._processes[index].join(max(0.0, end - time.monotonic()))

    def _stack(self, index: int) -> str:
        """The stack of an interrupted rank, without the frames that only run the task."""
        stack = stack_path(self._folder.name, index).read_text()
        # One paragraph per thread; the main thread, which ran the task, comes last.
        main = re.split(r"^(?:Current thread|Thread) 0x.*\n", stack, flags=re.MULTILINE)[-1]
        return re.split(r"^.*/rank\.py\", line", main, flags=re.MULTILINE)[0] or main

    def _output(self, index: int) -> str:
        path = output_path(self._folder.name, index)
        return path.read_text(errors="replace")[-SHOWN_OUTPUT_CHARS:] if path.exists() else ""


def _serve(index: int, size: int, folder: str, connection: Connection) -> None:
    # Imported only here: it loads torch, which pytest itself does without unless a test asks for it.
    from harness.worlds import rank

    rank.serve(index, size, folder, connection)


def start_server() -> None:
    """Start the process that ranks are forked from; it loads its modules while pytest goes on."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # gloo would listen on the interface of the host's name.
    needed = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    # Some Pythons load the modules before they know the path that they receive, and skip missing ones.
    needed["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    before = {name: os.environ.get(name) for name in needed}
    os.environ.update(needed)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_WORLDS = pytest.StashKey[Worlds]()


def pytest_configure(config: pytest.Config) -> None:
    # OpenMP reads it once, when torch is loaded. Threads of one process that wait for each other turn round meanwhile:
    # where cores are shared, tests without ranks took four times as long with two threads as with one.
    os.environ["OMP_NUM_THREADS"] = "1"
    config.stash[_WORLDS] = Worlds(capture=config.getoption("capture") != "no")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes run tests: one for each core, up to four, since ranks need cores as well.

    A single file is not worth a second start, and slow tests need all cores for themselves.
    """
    is_folder_run = any(Path(argument).is_dir() for argument in config.args)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    alone = (
        not is_folder_run
        or "not slow" not in config.option.markexpr
        or config.getoption("capture") == "no"
        or cores == 1
    )
    return 0 if alone else min(cores, 4)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_WORLDS].stop()


def pytest_pycollect_makemodule(module_path: Path) -> None:
    source = module_path.read_bytes()
    # The server loads torch while pytest imports the test modules. One that never says "world" needs no ranks.
    if b"world" in source:
        start_server()
    if re.search(rb"^(import|from) (torch|lightning)\b", source, re.MULTILINE):
        importlib.import_module("harness.worlds.light_torchmetrics")  # before they load it all


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of the parameter sets that run."""
    parser.addoption(
        "--set",
        default="0",
        help=f"of tests on ranks: 0 to {SETS - 1}, or 'commit' for the one that the commit's hash chooses, as in CI",
    )


def chosen_set(text: str) -> int:
    """The number of the parameter sets that run; 0 for a commit where there is no repository."""
    if text != "commit":
        return int(text) % SETS
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return int(told.stdout[:8], 16) % SETS if told.returncode == 0 else 0


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all but one of eight parameter sets of each test on ranks, or marked so, slow; none where files are run.

    Where all tests are run, only every other test on ranks is, and the default run takes a third of these.
    """
    folders = [Path(argument).resolve() for argument in config.args if Path(argument).is_dir()]
    if not folders:
        for item in items:
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "extended"]
        return
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        on_ranks = "worlds" in getattr(item, "fixturenames", ()) or item.get_closest_marker("world") is not None
        is_sampled = on_ranks or item.get_closest_marker("sampled") is not None
        if is_sampled and item.get_closest_marker("slow") is None and item.get_closest_marker("gpu") is None:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen, are_all = chosen_set(config.getoption("--set")), Path(__file__).parents[2] in folders
    for test, parameters in by_test.items():
        part = (zlib.crc32(test.encode()) - chosen) % PARTS if are_all else 0
        for position, item in enumerate(parameters):
            if position % SETS != chosen % min(SETS, len(parameters)) or part % 2:
                item.add_marker("slow")
            elif part:
                item.add_marker("extended")


def pytest_collection_finish() -> None:
    gc.freeze()  # what was loaded by now never becomes garbage; collections may skip it


@pytest.fixture(scope="session")
def worlds(pytestconfig: pytest.Config) -> Iterator[Worlds]:
    """Runs functions on the ranks of a world: `worlds.run(n, function, *args, **kwargs) -> [result of each rank]`."""
    yield pytestconfig.stash[_WORLDS]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("world")
    if marker is None:
        return None
    (n,) = marker.args
    values = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    failure = None
    try:
        pyfuncitem.config.stash[_WORLDS].run(n, pyfuncitem.obj, **marker.kwargs, **values)
    except RankError as error:
        failure = str(error)
    if failure is not None:  # outside of the except clause, or pytest would print it twice
        pytest.fail(failure, pytrace=False)
    return True
