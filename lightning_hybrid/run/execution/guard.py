"""A guard under which all ranks stop together if one of them runs out of memory, and none waits for it in a collective.

A rank that runs out of memory joins no further collective of the step, and a communicator in which others wait for it
cannot be used again. So no rank enters a collective before all ranks of its group have arrived at it, which they tell
each other through the store by which they met:

    rank 0   forward   arrives at all-reduce 1 ... all have arrived: "go" ... arrives at 2 ... "stop"     end
    rank 1   forward   arrives at all-reduce 1 ........................ out of memory: "failed"           end

The first rank that decides on a collective, "go" as the last one to arrive or "stop" as one that waits and reads that
another has failed, decides for all (``compare_set`` of the store is atomic). So each collective runs on all its ranks,
or on none. Messages between pipeline stages are not awaited by their sender; those that are left are discarded.

A guarded collective costs some round trips to the store, so that only steps of a new size are guarded.
"""

from __future__ import annotations

import contextlib
import gc
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import batch_size_scaling
from torch import nn

from lightning_hybrid.collectives.arrivals import store_of_run
from lightning_hybrid.collectives.forbidden import COLLECTIVES, POINT_TO_POINT
from lightning_hybrid.errors import RankOutOfMemory, causes_of, is_out_of_memory
from lightning_hybrid.patching import around, replace
from lightning_hybrid.run.build import OwnedByRun, RunOwner
from lightning_hybrid.run.execution.steps import StepExecution
from lightning_hybrid.shared_memory.collectives import SharedMemory
from lightning_hybrid.shared_memory.transfers import Transfers, discard_unread_transfers
from lightning_hybrid.strategies.world.ranks import RankWorld

T = TypeVar("T")
_SHOWN_CHARS = 300
# The words by which Lightning recognizes an error for want of memory (``is_oom_error``).
_OUT_OF_MEMORY = {"cuda": "CUDA out of memory", "cpu": "DefaultCPUAllocator: can't allocate memory"}
_FIRST_PAUSE, _LONGEST_PAUSE = 5e-5, 5e-3  # seconds between two reads of the store
_READS_PER_CHECK = 50  # reads of the store between two checks for ranks that have failed otherwise


class _StoppedByPeer(BaseException):
    """Another rank has run out of memory, and will not join the collective that this rank has arrived at.

    No code on the way handles it as an error of the step.
    """


class MemoryGuard:
    """Runs functions on all ranks, and stops them on all ranks if one runs out of memory.

    Attributes:
        is_active: Whether a function runs now.
    """

    def __init__(self, world: RankWorld) -> None:
        """Prepare; all ranks make their guards of a run in one order."""
        self.is_active = False
        self._world, self._timeout = world, world.timeout.total_seconds()  # of one wait
        self._mesh = mesh = world.mesh
        self._size = mesh.layout.world_size
        self._attempt = 0
        self._rounds: Counter[str] = Counter()  # collectives that this rank has arrived at, by group
        self._store: Any = store_of_run("memory-guard", mesh.rank) if self._size > 1 else None

    def run(self, function: Callable[[], T]) -> T:
        """Run a function that all ranks run; collective.

        Raises:
            RankOutOfMemory: It ran out of memory on some rank; raised on all of them, when no collective is under way.
        """
        if self.is_active:
            return function()
        result: list[T] = []
        reason = ""
        self._attempt += 1
        self._rounds.clear()
        self.is_active = True
        try:
            with self._guarded():
                result.append(function())
        except (Exception, _StoppedByPeer) as error:
            if not _is_stop(error) and not is_out_of_memory(error):
                raise
            reason = self._report(error)
        finally:
            self.is_active = False
        # The error is dropped by now, with the frames of its traceback, which hold the tensors of the step.
        reason = self._agree(reason)
        if not reason:
            return result[0]
        result.clear()
        discard_unread_transfers()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise RankOutOfMemory(reason, entry="rank-out-of-memory")

    def meet(self) -> None:
        """Wait until all ranks are here, or one has run out of memory; nothing if no function runs."""
        if self.is_active and self._size > 1:
            self._arrive("world", self._size)

    def any_rank(self, decision: bool) -> bool:
        """Return whether any rank decided so; collective, on the host."""
        return self.largest(float(decision)) > 0

    def largest(self, number: float) -> float:
        """Return the largest of the ranks' numbers; collective, on the host."""
        if self._size == 1:
            return number
        sent = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self._mesh.dedicated_group("world", "memory guard", "gloo"))
        return float(sent)

    # -- failures -----------------------------------------------------------------------------------------------------

    def _report(self, error: BaseException) -> str:
        if _is_stop(error):
            return "another rank ran out of memory"
        lines = str(error).strip().splitlines() or [""]
        kind = _OUT_OF_MEMORY.get(self._mesh.device_mesh.device_type, _OUT_OF_MEMORY["cpu"])
        shown = f"{type(error).__name__}: {lines[0][:_SHOWN_CHARS]}"
        reason = f"{kind} on rank {self._mesh.rank}, and all ranks have stopped the step: {shown}"
        if self._size > 1:
            self._store.compare_set(self._key("failed"), "", reason)
        return reason

    def _agree(self, reason: str) -> str:
        """Wait for all ranks at the end of an attempt; return the reason of the first one that failed, "" if none."""
        if self._size == 1:
            return reason
        outcome, failed = self._key("outcome"), self._key("failed")
        if self._store.add(self._key("ended"), 1) == self._size:
            has_failed = self._store.check([failed])
            self._store.set(outcome, self._store.get(failed) if has_failed else b"-")
        self._wait_for(outcome)
        found = self._store.get(outcome).decode(errors="replace")
        return "" if found == "-" else found

    # -- collectives --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        if self._size == 1:
            yield
            return
        reason = "no rank enters a collective without the others"
        with contextlib.ExitStack() as undo:
            for name in COLLECTIVES:
                if name in vars(dist.ProcessGroup) and name not in POINT_TO_POINT:
                    undo.callback(around(dist.ProcessGroup, name, self._collective, reason=reason))
            for name in ("all_reduce", "all_gather", "exchange"):
                undo.callback(around(SharedMemory, name, self._in_shared_memory, reason=reason))
            undo.callback(around(Transfers, "receive", self._receive, reason=reason))
            yield

    @torch.compiler.disable
    def _collective(self, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.size() > 1:
            self._arrive(_name_of(group), group.size())
        return original(group, *args, **kwargs)

    @torch.compiler.disable
    def _in_shared_memory(self, original: Callable[..., Any], memory: SharedMemory, *args: Any) -> Any:
        group = memory.group
        if group is not None:
            self._arrive(f"{_name_of(group)}, shared memory", group.size())
        return original(memory, *args)

    @torch.compiler.disable
    def _receive(self, original: Callable[..., Any], transfers: Transfers, peer: int, tag: int, dtype: Any) -> Any:
        pauses = self._pauses()
        while not transfers.has_arrived(peer, tag, milliseconds=int(1e3 * _LONGEST_PAUSE)):
            if self._store.check([self._key("failed")]):
                raise _StoppedByPeer
            next(pauses)
        return original(transfers, peer, tag, dtype)

    def _arrive(self, name: str, size: int) -> None:
        """Arrive at the next collective of a group; returns if all its ranks are to enter it.

        Raises:
            _StoppedByPeer: None is.
        """
        self._rounds[name] += 1
        number = self._rounds[name]
        decision = self._key(name, str(number))
        if self._store.add(self._key(name, "arrived"), 1) == number * size:
            outcome = self._store.compare_set(decision, "", "go")
            if number > 1:  # all ranks have read the one before
                self._store.delete_key(self._key(name, str(number - 1)))
        else:
            self._wait_for(decision, stops=True)
            outcome = self._store.get(decision)
        if outcome == b"stop":
            raise _StoppedByPeer

    def _wait_for(self, key: str, *, stops: bool = False) -> None:
        """Wait for a decision of all ranks; "stop" becomes it where it ``stops`` if a rank has failed."""
        pauses = self._pauses()
        while not self._store.check([key]):
            if stops and self._store.check([self._key("failed")]):
                self._store.compare_set(key, "", "stop")
            time.sleep(next(pauses))

    def _pauses(self) -> Iterator[float]:
        """Yield the seconds to sleep between reads of the store.

        Raises:
            DistNetworkError: A rank has failed by another error.
            RuntimeError: It does not come within the timeout.
        """
        begin, pause = time.monotonic(), _FIRST_PAUSE
        for count in range(1, 2**62):
            if count % _READS_PER_CHECK == 0 and self._world.any_failed():
                raise dist.DistNetworkError("another rank has failed while this one waited for it")
            if time.monotonic() - begin > self._timeout:
                raise RuntimeError(
                    f"rank {self._mesh.rank} has waited {self._timeout:.0f} s for another one in a step that is guarded"
                    " against out-of-memory errors: the ranks call their layers in different orders, or one of them is"
                    " slow; set num_microbatches or batch_size yourself, or a longer Hybrid3DStrategy(timeout=...)"
                )
            yield pause
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _key(self, *names: str) -> str:
        return "/".join((str(self._attempt), *names))


def _is_stop(error: BaseException) -> bool:
    return any(isinstance(each, _StoppedByPeer) for each in causes_of(error))


def _name_of(group: dist.ProcessGroup) -> str:
    """A name of a group that no other group of the job has."""
    return f"{group.group_name} of {dist.get_process_group_ranks(group)[0]}"


def searches_batch_size(trainer: Any) -> bool:
    """Whether a callback of the trainer searches a batch size."""
    return any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks)


class BatchSizeTrials(OwnedByRun):
    """Lets all ranks stop a trial of a batch size together, and load one file after the last."""

    def __init__(self, owner: RunOwner, execution: StepExecution) -> None:
        """Guard trials until the end of the run."""
        super().__init__(owner)
        self._execution, self._world = execution, self.setting.world
        self._guard = MemoryGuard(self._world)
        self._modes: list[tuple[nn.Module, bool]] = []  # of modules, before a trial
        # Each rank would restore from a file of another name, of which one has been written.
        name, reason = self._world.broadcast(str(uuid.uuid4())), "all ranks search one batch size"
        names, undo = SimpleNamespace(uuid4=lambda: name), self._world.until_end
        undo.callback(replace(batch_size_scaling, "uuid", names, reason=reason))
        undo.callback(around(batch_size_scaling, "_try_loop_run", self._run_trial, reason=reason))

    def _run_trial(self, original: Callable[..., None], *args: Any) -> None:
        self._begin()
        try:
            self._guard.run(lambda: original(*args))
        except RankOutOfMemory:
            self._abandon()
            progress = self._world.progress
            progress.catch_up(*(int(self._guard.largest(number)) for number in progress.reached))
            raise

    def _begin(self) -> None:
        self._modes = [(each, each.training) for each in self.setting.module.modules()]
        if self.run.runner is not None:
            self.run.runner.forget_batch_sizes()

    def _abandon(self) -> None:
        self._execution.abandon()
        self.run.active.end_evaluation()
        for module, is_training in self._modes:
            module.training = is_training
        trainer = self.setting.trainer
        trainer.training = True  # a validation may have failed
        trainer._logger_connector.reset_results()
        trainer._logger_connector.reset_metrics()
        self._begin()
