"""Callback that draws the measured timeline of a training step: what each rank did when, and how much memory it used.

Each rank records when its actions ran. This callback gathers the records on one clock, and draws them as swim-lanes,
each action from the time when its inputs were available. The bound of a pipeline is the same actions, with the same
durations, without gaps between them: time lost beyond it went to transfers, dispatch and waiting for a core.

At the end of the run it prints which cause lost how much time, the slowest stage, and better cuts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn.parameter import is_lazy

from lightning_hybrid.batch.split import batch_size_of, elements_per_sample
from lightning_hybrid.callbacks import pictures
from lightning_hybrid.callbacks.actions import MeasuredStep, Ranks, check_ranks, gather_step
from lightning_hybrid.callbacks.lost_time.cuts import RebalancedCuts
from lightning_hybrid.callbacks.lost_time.files import costs_of, write_lost_time, write_measured_costs
from lightning_hybrid.callbacks.lost_time.steps import MeasuredSteps, metrics_of
from lightning_hybrid.callbacks.monitors.holders import PeakMeter
from lightning_hybrid.callbacks.monitors.memory import MemoryMonitor
from lightning_hybrid.callbacks.steps import step_of, steps_done
from lightning_hybrid.patching import around
from lightning_hybrid.predict.costs.layers import checksum_of_names
from lightning_hybrid.predict.measured import compared_lines
from lightning_hybrid.schedule import memory_to_svg, to_svg, to_trace
from lightning_hybrid.soft_failures import only_informs
from lightning_hybrid.text import wrapped

_PICTURES = (".svg", ".png")
_WHAT = "PipelineTimeline"


class PipelineTimeline(Callback):
    """Draws a training step: the actions of the ranks over time, and their memory.

    The measured bubble of a pipeline and that of its schedule are printed, and logged as "pipeline_bubble" and
    "pipeline_bubble_bound" where the trainer has loggers. Loggers that take images receive the pictures as
    "pipeline_timeline" and "memory_timeline" (needs matplotlib). Runs without stages are drawn too: forwards,
    backwards, the average over replicas as far as it follows the backward, and the optimizer's step.

    At the end of training it prints the lost time of the step of median length by cause (bubble, imbalance of stages,
    variation, communication, input), for the step and for each rank, the slowest stage, and ``pipeline_cuts`` that are
    predicted to be faster. All measured steps go to a JSON file beside the picture ("timeline_lost_time.json"), their
    shares to the loggers ("lost_time/..."), and the seconds of stages and units to "measured_costs.json" beside the
    checkpoints. Later plans of the model are corrected by that file; it has the memory of tensors on GPUs, and where a
    `MemoryMonitor` has measured it. A run whose sizes were planned prints the predicted step beside the measured one.

    A measurement is taken between two steps and costs one small collective. On a GPU the times are those of the device,
    by two CUDA events for each action of any step; a measurement waits for them.

    Args:
        path: where the picture goes; its suffix, ".svg" or ".png", says which kind (PNG needs matplotlib). A path that
            ends in ".json" receives a Chrome trace, for ui.perfetto.dev or chrome://tracing. Or a list of paths. With
            `every_n_steps` the step's number is put before the suffix.
        step: the step to measure, counted from 1; the first ones are slower than the others. In a run that
            resumes after that step it counts from the start of the run, unless `every_n_steps` measures later ones.
        every_n_steps: interval of further steps to measure.
        ranks: which ranks to draw: "first" for the first pipeline, "all", or those with these coordinates, by "data",
            "pipeline", "context" and "tensor", such as ``{"tensor": 0, "context": 0}`` for a pipeline per replica.
        memory_path: where a picture of the memory over the step goes (".svg" or ".png"): on a GPU that of tensors, on a
            CPU that of the process, read at the start and the end of each action. None for none.
        rebalance: changes the stages at the start of the next epoch to the proposed cuts where they are predicted to
            save more than 3 % of a step; checkpoints have the cuts, and a run that resumes begins with them. The full
            module and its optimizer states must fit into each rank for the change.

    Raises:
        TypeError: a number of steps is no int, `rebalance` is no bool.
        ValueError: a number of steps is below 1, a path has another suffix, or `ranks` selects none, or a
            part of a pipeline beside `rebalance`.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path] = "timeline.svg",
        step: int = 10,
        every_n_steps: int | None = None,
        *,
        ranks: Ranks = "first",
        memory_path: str | Path | None = None,
        rebalance: bool = False,
    ) -> None:
        self.paths = [Path(one) for one in ([path] if isinstance(path, str | Path) else path)]
        self.memory_path = None if memory_path is None else Path(memory_path)
        if not self.paths:
            raise ValueError(f"path={path!r} names no file for the timeline; set path='timeline.svg'")
        for one in self.paths:
            if one.suffix not in (*_PICTURES, ".json"):
                raise ValueError(f"path={str(one)!r} must end in .svg, .png or .json; set path='timeline.svg'")
        if self.memory_path is not None and self.memory_path.suffix not in _PICTURES:
            raise ValueError(f"memory_path={str(memory_path)!r} must end in .svg or .png; set memory_path='memory.svg'")
        pictures.check_counts(step=step, every_n_steps=every_n_steps)
        if not isinstance(rebalance, bool):
            raise TypeError(f"rebalance={rebalance!r} must be True or False")
        if rebalance and isinstance(ranks, Mapping) and "pipeline" in ranks:
            raise ValueError(
                f"rebalance=True proposes cuts from all stages, and ranks={dict(ranks)!r} measures a part;"
                " leave 'pipeline' out of ranks"
            )
        check_ranks(ranks)
        self.rebalance, self.cuts, self._steps = rebalance, RebalancedCuts(), MeasuredSteps()
        self._model = ModelAndMemory()
        self._undo = contextlib.ExitStack()
        self._batch_size: int | None = None
        self.step, self.every_n_steps, self.ranks = step, every_n_steps, ranks
        self._wanted_step = 0

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without what belongs to a run."""
        fresh = {"_steps": MeasuredSteps(), "_model": ModelAndMemory(), "_undo": contextlib.ExitStack()}
        return {**self.__dict__, **fresh}

    @property
    def rebalanced_cuts(self) -> RebalancedCuts | None:
        """The cuts that the strategy asks for between epochs; None where stages stay."""
        return self.cuts if self.rebalance else None

    @property
    def state_key(self) -> str:
        """One state in checkpoints for the callback that rebalances; others have none."""
        return f"PipelineTimeline(rebalance={self.rebalance}){'' if self.rebalance else id(self)}"

    def state_dict(self) -> dict[str, Any]:
        """Return the rebalanced cuts as a checkpoint has them."""
        return self.cuts.state_dict() if self.rebalance else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the cuts of a checkpoint, with which the run begins."""
        self.cuts.load_state_dict(state_dict)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the names and the number of the parameters, before ranks hold shards of them."""
        if stage == "fit":
            self._model = ModelAndMemory()
            with only_informs(_WHAT):
                self._model.describe(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Broadcasts what to measure from the first rank.

        Raises:
            ValueError: The run does not have the selected ranks.
        """
        done = steps_done(trainer)
        self._model.first_step = done + 1
        strategy: Any = trainer.strategy
        if not _is_recorded(strategy):
            rank_zero_info(
                f"PipelineTimeline draws nothing: the strategy is {type(strategy).__name__}, which records no actions;"
                " set strategy=Hybrid3DStrategy()"
            )
            return
        # A rank that waited for one with another step would hang.
        chosen = strategy.broadcast((self.step, self.every_n_steps, self.ranks, self.rebalance))
        self.step, self.every_n_steps, self.ranks, self.rebalance = chosen
        self._steps = MeasuredSteps()
        self._undo.callback(record_input_waits(trainer))
        check_ranks(self.ranks, strategy.layout)
        self._wanted_step = self.step
        if done >= self.step and self.every_n_steps is None:
            self._wanted_step += done
            rank_zero_info(
                f"PipelineTimeline: the run starts after step={self.step}, so it draws step {self._wanted_step}"
            )
        self._prepare(strategy, done + 1)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Records that the batch has come, and begins to measure memory."""
        if _is_recorded(trainer.strategy):
            step = step_of(trainer)
            if step.begins and self._is_wanted(step.number):
                with only_informs(_WHAT):
                    self._model.begin_step(trainer)
            trainer.strategy.recorder.end_input()  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measures the step that has just ended, if it was requested; collective."""
        (step, _, ends, _), strategy = step_of(trainer), trainer.strategy
        if not (ends and _is_recorded(strategy)):
            return
        if self._is_wanted(step):
            self._model.end_step(trainer, batch)
            if (measured := gather_step(strategy, self.ranks)) is not None:
                with only_informs(_WHAT):
                    self._analyze(trainer, measured, step, batch)
                with only_informs(_WHAT):
                    self._report(trainer, measured, step)
            if self.rebalance:
                self.cuts.propose(strategy, self._steps, step)
        self._prepare(strategy, step + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the lost time of the measured steps, or warns if training ended before the first one."""
        self._undo.close()
        if self._steps.steps:
            self._summarize(trainer)
        done = steps_done(trainer)
        if _is_recorded(trainer.strategy) and done < self._wanted_step:
            rank_zero_warn(
                f"PipelineTimeline wrote no picture: training ended after step {done}, before step"
                f" {self._wanted_step}; set a smaller step"
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores what was replaced."""
        self._undo.close()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Writes the measured costs beside the checkpoint."""
        self._write_costs(trainer)

    @only_informs(_WHAT)
    def _summarize(self, trainer: Trainer) -> None:
        run: Any = trainer.strategy.run  # type: ignore[attr-defined]
        rank_zero_info(wrapped("\n".join([*self._steps.lines(run.assignment), *self._compared_lines(trainer)])))
        where = [write_lost_time(self._steps, self.paths[0]), self._write_costs(trainer)]
        rank_zero_info(f"written: {', '.join(str(path) for path in where if path is not None)}")

    @only_informs("the file of measured costs")
    def _write_costs(self, trainer: Trainer) -> Path | None:
        if not self._steps.steps:
            return None
        return write_measured_costs(trainer, self._steps, self._batch_size, **self._model.fields(trainer))

    def _compared_lines(self, trainer: Trainer) -> list[str]:
        """The step as the plan of the run predicted it, beside the measured one; none without a plan."""
        plan = getattr(trainer.strategy, "predicted_plan", None)
        if plan is None or plan.time is None:
            return []
        return compared_lines(plan, costs_of(trainer, self._steps, self._batch_size, **self._model.fields(trainer)))

    def _analyze(self, trainer: Trainer, measured: MeasuredStep, step: int, batch: Any) -> None:
        self._batch_size = batch_size_of(batch)
        analyzed = self._steps.add(step, measured, trainer.strategy.run.assignment)  # type: ignore[attr-defined]
        if analyzed is None:
            return
        pictures.log_metrics(trainer, metrics_of(analyzed.lost.total), step)

    def _is_wanted(self, step: int) -> bool:
        return pictures.is_wanted(step, self._wanted_step, self.every_n_steps)

    def _prepare(self, strategy: Any, step: int) -> None:
        """Records times in a step that is measured, and samples memory if it is drawn."""
        is_drawn = self.memory_path is not None or any(path.suffix == ".json" for path in self.paths)
        is_measured, recorder = self._is_wanted(step), strategy.recorder
        for readers, reads in ((recorder.time_readers, True), (recorder.memory_readers, is_drawn)):
            if reads and is_measured:
                readers.add(self)
            else:
                readers.discard(self)

    def _report(self, trainer: Trainer, measured: MeasuredStep, step: int) -> None:
        timeline, bubbles = measured.timeline, measured.bubbles
        shared: Any = {"columns": measured.columns, "group_size": measured.group_size}
        title, caption = f"Step {step}, measured", f"{1000 * timeline.makespan_seconds:.0f} ms"
        if bubbles is not None:
            title = f"Step {step}: idle {bubbles[0]:.1%} measured, {bubbles[1]:.1%} by the schedule"
            caption = "idle: waiting share before reduce and optimizer"
        svg = to_svg(timeline, title=title, caption=caption, **shared)
        written = [pictures.numbered(path, step, self.every_n_steps) for path in self.paths]
        for path in written:
            if path.suffix == ".json":
                trace = to_trace(timeline, portals=measured.portals, memory=measured.memory, **shared)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(trace), encoding="utf-8")
            else:
                pictures.write_picture(svg, path)
        pictures.log_picture(trainer.loggers, "pipeline_timeline", lambda: pictures.figure_of(svg), step)
        if self.memory_path is not None:
            is_cuda = trainer.strategy.root_device.type == "cuda"
            kind = "memory of tensors on the device" if is_cuda else "memory of the process (resident set size)"
            title = f"Step {step}, memory between actions"
            memory = memory_to_svg(measured.memory, timeline.num_ranks, title, kind=kind, **shared)
            written.append(pictures.numbered(self.memory_path, step, self.every_n_steps))
            pictures.write_picture(memory, written[-1])
            pictures.log_picture(trainer.loggers, "memory_timeline", lambda: pictures.figure_of(memory), step)
        self._log(trainer, measured, step, ", ".join(map(str, written)))

    def _log(self, trainer: Trainer, measured: MeasuredStep, step: int, written: str) -> None:
        if measured.bubbles is None or measured.seconds is None:
            rank_zero_info(
                f"step {step}: {1000 * measured.timeline.makespan_seconds:.0f} ms after its input; {written}"
            )
            return
        (bubble, bound), (seconds, bound_seconds) = measured.bubbles, measured.seconds
        line = (
            f"step {step}: idle {bubble:.1%} measured, {bound:.1%} by the schedule (its forwards and backwards:"
            f" {1000 * seconds:.0f} ms measured, {1000 * bound_seconds:.0f} ms by the schedule); {written}"
        )
        rank_zero_info(wrapped(line))
        pictures.log_metrics(trainer, {"pipeline_bubble": bubble, "pipeline_bubble_bound": bound}, step)


def _is_recorded(strategy: Any) -> bool:
    return getattr(strategy, "recorder", None) is not None


def record_input_waits(trainer: Trainer) -> Callable[[], None]:
    """Let the strategy's recorder know when the training loop begins to fetch a batch; returns what undoes it."""

    def before_fetch(original: Callable[[], None]) -> None:
        recorder: Any = trainer.strategy.recorder  # type: ignore[attr-defined]
        recorder.begin_input()
        original()

    loop: Any = trainer.fit_loop.epoch_loop
    return around(loop, "_on_before_fetch", before_fetch, reason="records waits for input")


class ModelAndMemory:
    """The model of a run, and the peak memory of its tensors in a measured step.

    The peak is that of the run's `MemoryMonitor`, if there is one that has measured. On a GPU it is otherwise that of
    the allocator in the measured step, whose peak statistic is reset when that step begins.
    """

    def __init__(self) -> None:
        self.model: dict[str, Any] = {}
        self.peaks: tuple[int, ...] = ()
        self.first_step = 1
        self._meter: PeakMeter | None = None

    def describe(self, module: LightningModule) -> None:
        """Take the names and the number of the parameters, before ranks hold shards of them."""
        named = list(module.named_parameters())
        self.model = {"name": type(module).__name__}
        if named and not any(is_lazy(parameter) for _, parameter in named):
            self.model |= {
                "parameters": sum(parameter.numel() for _, parameter in named),
                "names_checksum": checksum_of_names(name for name, _ in named),
            }

    def begin_step(self, trainer: Trainer) -> None:
        """Begin a measured step."""
        device = trainer.strategy.root_device
        if device.type == "cuda":
            self._meter = PeakMeter(device)
            self._meter.start()

    def end_step(self, trainer: Trainer, batch: Any) -> None:
        """End a measured step; collective over all ranks on GPUs."""
        with only_informs("the file of measured costs"):
            elements = elements_per_sample(batch)
            if elements is not None:
                self.model["sample_elements"] = elements
        if trainer.strategy.root_device.type == "cuda":
            peak, meter, self._meter = 0, self._meter, None
            with only_informs("the measured memory"):
                peak = 0 if meter is None else meter.stop(0)
            rows = pictures.gather_rows(torch.tensor([peak], dtype=torch.float64), trainer.strategy)
            if rows.min() > 0:  # all ranks have measured
                self.peaks = tuple(int(row[0]) for row in rows)

    def fields(self, trainer: Trainer) -> dict[str, Any]:
        """Return fields of `MeasuredCosts`."""
        callbacks: Any = trainer
        monitors = [each for each in callbacks.callbacks if isinstance(each, MemoryMonitor) and each.measured]
        peaks = tuple(int(row["peak"]) for row in monitors[0].measured) if monitors else self.peaks
        return {"model": dict(self.model), "peak_memory": peaks, "first_step": self.first_step}
