"""Measure ways to do the same training step against each other, although the machine is never quiet.

Each rank is one process that lives for the whole benchmark, with one thread for computing. Every way (`Variant`) is set
up once, in a thread of its own on each of its ranks, and then the ways take turns, a few steps at a time; whoever
waits, waits on a lock. So what disturbs the machine disturbs all of them alike, and ratios are taken round by round.

    round 1:  A A  B B  C C    round 2:  B B  C C  A A    round 3:  C C  A A  B B    ...

All threads share one heap, which keeps what is freed (`_HEAP`). Otherwise glibc gives each thread a heap of its own,
whose end goes back to the system and is faulted in again whenever it happens to be free: up to 6000 page faults in a
step of one variant and 300 of another, two per cent of their CPU time, and others in the next run.

A variant is `function(turn)`. It sets itself up and then calls `turn.border()` before each step, for ever. Wall time
is from the first rank's start to the last rank's end; CPU time is that of all threads of all ranks, gloo's included.
"""

from __future__ import annotations

import cProfile
import dataclasses
import io
import os
import pstats
import statistics
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_SECONDS = 600  # of one set-up or one turn
_HEAP = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
_PRELOADED = ["torch", "torch.distributed.pipelining", "lightning.pytorch", "lightning_hybrid"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do the step.

    Attributes:
        name: For the table.
        run: `run(turn)`, a function that can be pickled; never returns.
        ranks: How many ranks take part, from rank 0 on; all if None.
        mean_of_ranks: Wall time is the mean over the ranks, which have nothing to do with each other.
    """

    name: str
    run: Callable[[Turn], None]
    ranks: int | None = None
    mean_of_ranks: bool = False


class Turn:
    """What a variant knows of the others on its rank: when to go on."""

    def __init__(self, connection: Connection, rank: int, *, profile: bool) -> None:
        self.rank = rank
        self._connection = connection
        self._go = threading.Semaphore(0)
        self._left = 0
        self._begin: tuple[float, float] | None = None
        self.note: Callable[[], Any] | None = None  # what else a variant has to say of each of its turns
        self._profile = cProfile.Profile() if profile else None

    def release(self, steps: int) -> None:
        """Let the variant do some steps; called from the rank's main thread."""
        self._left = steps
        self._go.release()

    def border(self) -> None:
        """Stand between two steps: at the end of a turn, report and wait for the next one."""
        if self._left > 1:
            self._left -= 1
            return
        end = time.perf_counter(), time.process_time()
        if self._profile is not None and self._begin is not None:
            self._profile.disable()
        self._connection.send(("turn", self._begin, end, self.note() if self.note is not None else None))
        self._go.acquire()
        if self._profile is not None:
            self._profile.enable()
        self._begin = time.perf_counter(), time.process_time()

    def profiled(self) -> str:
        """Where the time of the profiled turns went."""
        text = io.StringIO()
        if self._profile is not None:
            stats = pstats.Stats(self._profile, stream=text)
            stats.sort_stats("tottime").print_stats(45)
            stats.sort_stats("cumulative").print_stats("lightning_hybrid", 45)
        return text.getvalue()


@dataclasses.dataclass
class Result:
    """Seconds per step of one variant, by round."""

    name: str
    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    notes: list[list[Any]] = dataclasses.field(default_factory=list)  # by round, then by rank: see `Turn.note`
    profile: str = ""


def compare(
    variants: Sequence[Variant], *, ranks: int, rounds: int, steps: int, warm_up: int = 1, profile: bool = False
) -> list[Result]:
    """Run variants in turns.

    Args:
        variants: What to compare.
        ranks: Number of processes.
        rounds: How often each variant has its turn.
        steps: Steps per turn.
        warm_up: Turns that are not measured.
        profile: Run rank 0 of each variant under cProfile (which slows it down).
    """
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TOKENIZERS_PARALLELISM="false")
    os.environ.update(_HEAP)  # read when the server starts
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    connections: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                arguments = (rank, ranks, f"file://{folder}/store", theirs, list(variants), profile)
                processes.append(context.Process(target=_rank, args=arguments, daemon=True))
                processes[-1].start()
                theirs.close()
                connections.append(ours)
            results = [Result(variant.name) for variant in variants]
            for index, variant in enumerate(variants):
                _take_turn(connections[: variant.ranks], ("set up", index))
            for number in range(-warm_up, rounds):
                for place in range(len(variants)):
                    index = (place + number) % len(variants)
                    variant, result = variants[index], results[index]
                    rows = _take_turn(connections[: variant.ranks], ("go", index, steps))
                    if number >= 0:
                        begins, ends, notes = zip(*rows, strict=True)
                        spans = [end[0] - begin[0] for begin, end, _ in rows]
                        whole = max(end[0] for end in ends) - min(begin[0] for begin in begins)
                        result.wall.append((statistics.mean(spans) if variant.mean_of_ranks else whole) / steps)
                        result.cpu.append(sum(end[1] - begin[1] for begin, end, _ in rows) / steps)
                        result.notes.append(list(notes))
            if profile:
                for index, result in enumerate(results):
                    connections[0].send(("profile", index))
                    result.profile = connections[0].recv()[1]
            return results
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _take_turn(connections: Sequence[Connection], command: tuple[Any, ...]) -> list[tuple[Any, Any, Any]]:
    for connection in connections:
        connection.send(command)
    rows: dict[int, tuple[Any, Any, Any]] = {}
    give_up = time.monotonic() + TIMEOUT_SECONDS
    while len(rows) < len(connections):
        for rank, connection in enumerate(connections):
            # A rank that failed makes the others wait, so all are listened to.
            if rank not in rows and connection.poll(0.02):
                kind, *content = connection.recv()
                if kind == "error":
                    raise SystemExit(f"rank {rank}, {command}:\n{content[0]}")
                rows[rank] = content[0], content[1], content[2]
        if time.monotonic() > give_up:
            missing = [rank for rank in range(len(connections)) if rank not in rows]
            raise SystemExit(f"{command}: ranks {missing} have not answered for {TIMEOUT_SECONDS} s")
    return [rows[rank] for rank in sorted(rows)]


def _rank(
    rank: int, ranks: int, store: str, connection: Connection, variants: Sequence[Variant], profile: bool
) -> None:
    import logging

    import torch
    import torch.distributed as dist

    # What Lightning wants to find where it did not start the processes itself.
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks), RANK=str(rank))
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    turns = [Turn(connection, rank, profile=profile and rank == 0) for _ in variants]

    def start(index: int) -> None:
        try:
            torch.set_num_threads(1)
            variants[index].run(turns[index])
            raise RuntimeError(f"{variants[index].name} ended")
        except BaseException:
            connection.send(("error", traceback.format_exc()))

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_SECONDS))
    # This thread only listens, so that a rank ends with its parent whatever its variants wait for.
    while True:
        try:
            kind, index, *rest = connection.recv()
        except EOFError:
            os._exit(1)
        if kind == "set up":
            threading.Thread(target=start, args=(index,), daemon=True).start()
        elif kind == "profile":
            connection.send(("profile", turns[index].profiled()))
        else:
            turns[index].release(*rest)


# --- the Trainer as a variant ----------------------------------------------------------------------------------------


def fit(turn: Turn, module: Any, batch: Any, **options: Any) -> None:
    """Fit a LightningModule on one batch for ever, through a real Trainer.

    Args:
        turn: Steps run from one batch of the epoch loop to the next, so the loop between batches counts.
        module: The LightningModule.
        batch: The same for every step; its content does not matter.
        options: Of the Trainer.
    """
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "max_epochs": -1,
    }
    trainer = Trainer(**(defaults | options))
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def from_border(fetcher: Any) -> None:
        # Not in a hook: while those run, the default group is another one, for the other variants of this process too.
        turn.border()
        advance(fetcher)

    loop.advance = from_border
    trainer.fit(module, DataLoader([batch] * 100_000, batch_size=None))


# --- the report ------------------------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(over: Sequence[float], under: Sequence[float], factor: float = 1.0) -> tuple[float, float, float]:
    """Quartiles of the ratio, taken round by round."""
    return quartiles([factor * a / b for a, b in zip(over, under, strict=True)])


def print_table(title: str, results: Sequence[Result]) -> None:
    """Milliseconds per step: median (quartiles), and the ratio to the first row."""
    print(f"\n{title} ({len(results[0].wall)} rounds; ms per step: median [quartiles], ratio to the first row)")
    width = max(len(result.name) for result in results)
    print(f"  {'':{width}}  {'wall':>32}  {'CPU, all ranks':>32}")
    for result in results:
        cells = []
        for mine, first in ((result.wall, results[0].wall), (result.cpu, results[0].cpu)):
            low, middle, high = (1000 * value for value in quartiles(mine))
            cells.append(f"{middle:8.1f} [{low:7.1f} {high:7.1f}] x{ratios(mine, first)[1]:5.3f}")
        print(f"  {result.name:{width}}  {cells[0]:>32}  {cells[1]:>32}")


def verdict(
    what: str, value: tuple[float, float, float], *, at_most: float | None = None, at_least: float | None = None
) -> bool:
    """Print one requirement, what was reached (the median), its quartiles, and PASS or MISS."""
    low, middle, high = value
    passed = (at_most is None or middle <= at_most) and (at_least is None or middle >= at_least)
    bound = f"<= {at_most:.3f}" if at_most is not None else f">= {at_least:.3f}"
    print(f"  {'PASS' if passed else 'MISS'}  {what}: {middle:.3f} [{low:.3f} {high:.3f}], must be {bound}")
    return passed
