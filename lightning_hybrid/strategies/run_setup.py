"""The set-up of a run, in order: agree on the start, record and cut, drop what lives elsewhere, build optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import LBFGS

from lightning_hybrid.experts.parallel.expert_parallel import SharedExperts
from lightning_hybrid.full_params.cross_stage_mode import GlobalReads
from lightning_hybrid.full_params.module_conversions import pass_over_absent
from lightning_hybrid.full_params.value_locations import Contents
from lightning_hybrid.memory.recompute import Recompute
from lightning_hybrid.pipeline.stages.stage_plan import StagePlan
from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.strategies.logs.log_reduction import ask_for_no_sync
from lightning_hybrid.strategies.logs.logger_proxies import forget_calls
from lightning_hybrid.strategies.module_partition import CutStrategy
from lightning_hybrid.strategies.options.strategy_options import Options, check_scripted, compile_options
from lightning_hybrid.strategies.start.empty_init import EmptyStart
from lightning_hybrid.strategies.start.initial_sync import WholeAgain, agree_on_start, check_left_whole
from lightning_hybrid.strategies.start.layout_table import describe
from lightning_hybrid.strategies.state.weight_averaging import Averages
from lightning_hybrid.strategies.techniques.fused_optimizer_steps import fuse_steps
from lightning_hybrid.strategies.techniques.gradient_reduction import (
    check_adascale,
    check_optimizers,
    connect_adascale,
    connect_gradients,
    scales_rates,
)
from lightning_hybrid.strategies.techniques.recomputation import (
    describe_policies,
    lend_parameters,
    recompute_plain_layers,
)
from lightning_hybrid.strategies.techniques.sync_batchnorm import synced_norms
from lightning_hybrid.strategies.techniques.tensor_parallel import (
    KeyedDraws,
    describe_tensor_plans,
)
from lightning_hybrid.strategies.techniques.zero import (
    check_shard,
    describe_by_hand,
    describe_zero,
    hold_in_evaluation,
    layers_of_parameters,
    offload_states,
    share_out,
    share_steps,
    step_on_shards,
    steps_by_hand,
)
from lightning_hybrid.strategies.user_code.dataloader_reads import serve_loaders
from lightning_hybrid.strategies.user_code.hook_reads import HookReads, summarize_wholes
from lightning_hybrid.strategies.user_code.user_hooks import read_globally
from lightning_hybrid.strategies.user_code.user_optimizers import search_by_mean_loss, watch_step, work_on_shards
from lightning_hybrid.tensor.runtime.sharded_model import ModelShards


class SetUpStrategy(CutStrategy):
    """Applies what the user asked for to the user's module, and undoes it at the end."""

    def __init__(self, *, options: Options, **lightning: Any) -> None:
        """Args: options: what was asked for. lightning: as ``CutStrategy``."""
        super().__init__(options=options, **lightning)
        self._stop_reads = contextlib.ExitStack()

    def setup(self, trainer: pl.Trainer) -> None:
        """Place the model: agree on the start, record and cut, drop what lives elsewhere, build optimizers."""
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        check_left_whole(module)
        ask_for_no_sync()
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if self._recompute is not None:
            check_scripted(module)
        self._by_hand = is_fitting and steps_by_hand(module, self.options)
        if is_fitting:
            check_shard(self.options.zero_stage, self.mesh)
            self._norms = synced_norms(self._layer_sync, self.mesh, self._verify_first_step)
            self.begin_verification(module)
        empty = self._adopt_empty()
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if empty is not None:
            empty.hide(module)
        # Weights and generators must agree before anything is drawn or recorded.
        self._averages = Averages(trainer)
        seed = agree_on_start(module, self.mesh, self.data_rank, self.root_device, self._averages.copies)
        self._seed = seed if self._seed is None else self._seed
        # What the start hooks set comes later, and what the first batch sets: they may let a step be cut.
        self._tries = 2 if is_fitting and self._needs_runner() else 0
        self._lay_out(trainer, module, empty=empty)
        if is_fitting:
            # Optimizers come after absent parameters are in place: they hold the user's own Parameter objects.
            self.setup_optimizers(trainer)
            self._connect_gradients(module)
            self._stop_reads.callback(self._share_buffers(trainer, module))
        self.setup_precision_plugin()
        if is_fitting and not self._offloaded:
            _optimizers_to_device(self.optimizers, self.root_device)
        self._pickle_in_full()

    def _lay_out(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        arguments: Sequence[Any] | None = None,
        refusal: str = "",
        *,
        empty: EmptyStart | None = None,
    ) -> None:
        """Give this rank what it holds of the module, which is whole; arguments as for ``_record``."""
        self._plan = self._runner = self._shards = self._parts = self._compiled = self._zero = None
        self._expert_summary = self._instead = ""
        self._wider_mesh = None
        self._experts, self._zero_cuts, self._recomputing, self._recomputation = None, [], None, None
        if self._recompute is not None and not self._needs_runner():
            is_compiled = self.options.compile is not None
            self._recomputation = recompute_plain_layers(module, self._recompute, compiled=is_compiled)
            self._recomputing = self._recomputation.running
        assert self._seed is not None and self._averages is not None
        randomness = KeyedRandomness(self._seed, self.root_device)
        if self._needs_runner():
            self._record(trainer, module, randomness, arguments, refusal)
            self._hold_parts(trainer, module)
        if empty is not None and empty.fill(None if self._is_whole else self._plan):
            self._empty = None
        parts, shards, experts = self.parts, self.shards, self.experts
        if parts is not None:
            parts.cut_parameters(module)
            self._share_out(trainer, module)
        if shards is not None:
            shards.be_ready(partial(KeyedDraws, device=self.root_device), rank_zero_warn, randomness.apart)
            self._gather_on_read(shards)
        if experts is not None:
            experts.be_ready()
        self._averages.follow(module, None if self._is_whole else self._plan, parts, self.averaged_state)
        self._compile_units(module, compile_options(self.options.compile), randomness)
        self._announce()

    @property
    def experts(self) -> SharedExperts | None:
        """The experts that replicas share, while the run trains."""
        return self._experts

    def _needs_runner(self) -> bool:
        return self._in_parts_by_layout or (self.options.microbatches or 1) > 1 or self._weight is not None

    def ask_to_recompute(self, recompute: Recompute) -> None:
        """Recompute layers as a callback asks.

        Raises:
            ValueError: Something else was asked for.
        """
        if self._recompute is not None and self._recompute != recompute:
            raise ValueError(f"recompute={self._recompute!r} and recompute={recompute!r} are both asked for; name one")
        self._recompute = recompute

    def _gather_on_read(self, shards: ModelShards) -> None:
        """Have code outside of layers find full parameters."""
        assert self._runner is not None
        shards.gather_on_read(self._runner.guards)
        if (runner := self._plain_runner) is not None:
            runner.joins_results = any(plan.vocabulary or plan.positions for plan in shards.plans.values())

    def _hold_parts(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Keep only this rank's stages; hooks find the module as one process has it."""
        assert self._plan is not None
        if not (self._plan.is_cut and self._in_parts_by_layout):
            return
        self._plan.drop_foreign()
        self._in_parts(module)
        self._read_globally(trainer, module, self._plan)
        if trainer.state.fn == TrainerFn.FITTING:
            self._whole_again = WholeAgain(self)
            trainer.callbacks.insert(0, self._whole_again)  # type: ignore[attr-defined]

    def _share_out(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Be ready to gather the parameters that are cut over replicas."""
        if self._experts is not None:
            assert self._parts is not None
            begin = partial(self._experts.begin_evaluation, self._parts)
            self._stop_reads.callback(hold_in_evaluation(trainer, begin, self._experts.end_evaluation))
        if not self._zero_cuts:
            return
        assert self._plan is not None
        self._zero = share_out(
            module,
            self._plan,
            self._layer_reads,
            self._zero_cuts,
            self._experts,
            self._shard_mesh,
            self.root_device,
            stage=self._zero_stage,
            reshard_after_forward=False if scales_rates(trainer) else self.options.reshard_after_forward,
            offload=self.options.offloaded,
            agree=lambda needed: self.reduce_boolean_decision(needed, all=False),
            guards=self._guards,
        )
        if self._recomputation is not None:
            lend_parameters(self._recomputation, self._zero)
        self._stop_reads.callback(hold_in_evaluation(trainer, self._zero.begin_evaluation, self._zero.end_evaluation))

    def _read_globally(self, trainer: pl.Trainer, module: pl.LightningModule, plan: StagePlan) -> None:
        """Let hooks of the user read gradients and parameters of all stages."""
        parameters = dict(module.named_parameters())
        holders = {name: plan.ranks_of(name) for name in parameters}
        stages = None
        if plan.num_ranks > 1:
            group, homes = self.mesh.group("pp"), plan.buffer_homes
            self._stop_reads.callback(pass_over_absent(module))
            stages = self._reads = GlobalReads(parameters, holders, group, self.root_device, buffer_homes=homes)
        self._hook_reads = reads = HookReads(
            stages,
            self._parts,
            parameters,
            Contents(self._shard_mesh.group("holders"), self.root_device, "layer's"),
            over_replicas=bool(self._zero_cuts) or self._experts is not None,
        )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelSummary):
                self._stop_reads.callback(summarize_wholes(callback, reads))
        assert self._runner is not None
        self._stop_reads.callback(
            serve_loaders(
                trainer,
                module,
                self._runner.uncut,
                in_parts=lambda: not self._is_whole,
                zero=lambda: self._zero,
                meets=self._meets_in_loaders,
            )
        )
        self._stop_reads.callback(
            read_globally(
                trainer,
                module,
                reads,
                latest=lambda: self._hook_reads or reads,
                in_parts=lambda: not self._is_whole,
                complete=lambda: self._grads_complete,
                passes=self._passes,
            )
        )

    def _meets_in_loaders(self, refers: bool) -> bool:
        with self.launcher_world():
            if self._experts is not None or not self.reduce_boolean_decision(refers, all=False):
                return False
            assert self._zero is not None
            self._zero.meet_apart(self._shard_mesh)
        return True

    def _announce(self) -> None:
        first = self._plan.first.assignment if self._plan is not None and self._plan.first is not None else None
        means = self._is_pipelined and self._weight is None and self.options.microbatches != 1
        texts = [describe(self.layout, first, self.options.schedule, means=means)]
        if self._instead:
            texts.append(self._instead)
        if self._shards is not None:
            texts.append(describe_tensor_plans(self._shards.plans, self._plan_summary))
        if self._expert_summary:
            texts.append(self._expert_summary)
        if self._zero is not None:
            size = self._shard_mesh.size("dp_shard")
            texts.append(describe_zero(self._zero_stage, size, per_layer=self._zero.per_layer))
        if self._by_hand:
            texts.append(describe_by_hand(self.options.zero_stage, self.layout.data_shard_size))
        if self.options.offloaded:
            places = (f"{what.replace('_', ' ')} {where}" for what, where in self.options.offloaded.items())
            texts.append(f"at rest: {', '.join(places)}")
        if self._recomputation is not None:
            texts.append(describe_policies(self._recomputation.policies, self._recompute))
        if self._compiled is not None:
            texts += self._compiled.lines()
        rank_zero_info("\n".join(texts))

    def _connect_gradients(self, module: pl.LightningModule) -> None:
        for reducer in self._reducers.values():
            reducer.close()
        check_optimizers(self.optimizers, self._plan)
        self._reducers, self._shared, counted = connect_gradients(
            module,
            self._plan,
            self._shard_mesh,
            averages=self._zero is None or self._steps_by_hand,
            experts=frozenset() if self._experts is None else self._experts.cut.placements.keys(),
        )
        parts = self._parts
        # By hand, replicas have full gradients.
        axes = ("pp", "cp", "tp") if self._steps_by_hand else ("pp", "cp", "parts")
        if self._in_parts_by_layout or isinstance(self.precision_plugin, HybridPrecision):
            held = None if parts is None else parts.first_held
            self.mesh_precision.connect_mesh(self._shard_mesh, lambda: counted, axes=axes, parts=held)
        own = [p for p in module.parameters() if id(p) in counted]
        if parts is not None:
            counted = {id(p) for p in own if parts.holds_first(p)}
        by_hand = self._steps_by_hand
        watched = {} if self._hook_reads is None or by_hand else self._hook_reads.of_optimizers(self.optimizers)
        fuse_steps([optimizer for optimizer in self.optimizers if optimizer not in watched], self._stop_reads)
        for optimizer, reads in watched.items():
            self._watched.append(optimizer)
            self._stop_reads.callback(watch_step(optimizer, reads, lambda: not self._is_whole))
        for optimizer in self.optimizers if self.mesh.size("data") > 1 else ():
            if isinstance(optimizer, LBFGS):
                average = partial(self.mesh.all_reduce, axis="data", op="mean")
                self._stop_reads.callback(search_by_mean_loss(optimizer, average))
        if offload := self.options.offloaded:
            layers = layers_of_parameters(module, self._plan)
            shared = self._shard_mesh.group("dp_shard") if self._by_hand else None
            self._offloaded += offload_states(
                self.optimizers, layers, offload, self.root_device, self._watched, self._stop_reads, self._zero, shared
            )
        shard = self._shard_mesh.group("dp_shard")
        self._stepped = share_steps(self.optimizers if self._by_hand else [], shard, self._stop_reads)
        if by_hand and self._guards is not None:
            self.mesh_precision.around_clipping = self._guards.off
            for optimizer in self.optimizers:
                self._stop_reads.callback(work_on_shards(optimizer, self._guards))
        if by_hand and self._zero is not None:
            self._watched += step_on_shards(self.optimizers, module, self._zero_cuts, self._stop_reads)
        if scales_rates(module.trainer):
            check_adascale(self.layout, parts)
            alone = {id(p) for p in own if parts is None or parts.holds_first(p, beside_replicas=True)}
            if not self._is_pipelined and self.mesh.rank_in("pp"):  # all of them run whole batches
                alone = set()
            is_copy = self._zero is not None and self._shard_mesh.rank_in("dp_replicate")
            if (runner := self._plain_runner) is not None:
                runner.run_whole()  # the gradients of shares are not those of batches
            connect_adascale(
                module.trainer, self.mesh, (alone, set() if is_copy else counted), self._reducers, self._zero
            )

    # -- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Leave a whole module behind on every rank."""
        self.make_whole()
        if self.lightning_module is not None:
            forget_calls(self.lightning_module)
        if self._averages is not None:
            self._averages.leave()
        self._dissolve()
        super().teardown()

    def _dissolve(self) -> None:
        """Take back what the layout has put on the user's objects."""
        self._stop_compiling()
        self._stop_reads.close()
        self._offloaded, self._watched, self._reads, self._hook_reads = [], [], None, None
        if self._whole_again is not None:
            self._trainer.callbacks.remove(self._whole_again)  # type: ignore[attr-defined]
            self._whole_again = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers = {}
        if self._zero is not None:
            self._zero.close()
            self._zero = None
