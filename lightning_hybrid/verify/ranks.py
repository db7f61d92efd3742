"""Launcher of ranks for the command: local processes that rendezvous on loopback and end with their parent."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lightning_hybrid.namespace import package_in_use

# How long the other ranks may take to end by themselves after the first failure.
_GRACE_SECONDS = 10.0
_SHOWN_CHARS = 4000
# What each process would import again: the strategy, and LightningCLI's parser. The user's modules may start threads.
_PRELOADED = ("lightning_hybrid.strategies.hybrid3d", "lightning_hybrid.verify.verification", "jsonargparse")


class RanksFailed(RuntimeError):
    """A rank failed, died, or exceeded the timeout."""


def run_ranks(n: int, function: Callable[..., Any], /, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Call a function of a module's top level on ``n`` new processes, as a launcher would; return the result of each.

    Arguments and results are pickled; ``timeout`` has the seconds until all ranks must have ended.

    Raises:
        RanksFailed: A rank failed; with the error and the output of the first that did.
    """
    call = pickle.dumps((function, args))
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", package_in_use(), *_PRELOADED])
    with tempfile.TemporaryDirectory(prefix="verify-ranks-") as folder, _start_environment():
        processes: list[Any] = []
        connections: list[Connection] = []
        port = str(_free_port())
        try:
            for rank in range(n):
                parent_end, child_end = context.Pipe()
                connections.append(parent_end)
                variables = {**_variables(n), "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
                # No daemons: the module's loaders may start workers.
                process = context.Process(target=_serve, args=(variables, f"{folder}/rank-{rank}", child_end, call))
                process.start()
                processes.append(process)
                child_end.close()
            return _collect(connections, folder, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for connection in connections:
                connection.close()


def _collect(connections: list[Connection], folder: str, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failure = ""
    end = time.monotonic() + timeout
    waiting = dict(zip(connections, range(len(connections)), strict=True))
    while waiting:
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                ok, value = connection.recv()
            except (EOFError, ConnectionResetError):
                ok, value = False, "the process died"
            if ok:
                results[rank] = pickle.loads(value)
            elif not failure:
                output = Path(folder, f"rank-{rank}").read_text(errors="replace")[-_SHOWN_CHARS:].strip()
                failure = f"rank {rank}: {value}" + (f"\noutput of rank {rank}:\n{output}" if output else "")
                end = min(end, time.monotonic() + _GRACE_SECONDS)
    if failure:
        raise RanksFailed(failure)
    if waiting:
        raise RanksFailed(f"ranks {sorted(waiting.values())} of {len(connections)} still run after {timeout:g} s")
    return [results[rank] for rank in range(len(connections))]


def _serve(variables: dict[str, str], output: str, connection: Connection, call: bytes) -> None:
    _end_with_parent()
    with Path(output).open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(variables)
    reply: tuple[bool, bytes | str]
    try:
        function, args = pickle.loads(call)
        reply = True, pickle.dumps(function(*args))
    except BaseException as error:
        traceback.print_exc()
        reply = False, f"{type(error).__name__}: {error}"
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(reply)
    # Wait until the parent ends this process: rank 0 hosts the store, which others may still query.
    with contextlib.suppress(EOFError):
        connection.recv()


def _end_with_parent() -> None:
    """End this process when its parent ends, for whatever reason."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _variables(n: int) -> dict[str, str]:
    """The variables that torchrun sets, so that Lightning starts no processes; one thread per rank, loopback only."""
    return {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "verify",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


@contextlib.contextmanager
def _start_environment() -> Iterator[None]:
    """Set variables while processes start: OpenMP and hashing read them before any code of this package runs."""
    before = dict(os.environ)
    os.environ.update({"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
