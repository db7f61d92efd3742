"""Optimizer steps in float32 under every layout: parity with a hand-written reference, checkpoints, and memory."""

import copy
import tempfile
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from harness.fits import Run, fit, fit_reference, refusal, trainer_of
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.callbacks import LocalSGD
from lightning_hybrid.errors import PrecisionError, StepError
from lightning_hybrid.optim import LAMB
from lightning_hybrid.precision.float32_step import MASTER_WEIGHT
from lightning_hybrid.run.optimization import check_random_rounding
from lightning_hybrid.techniques.offload import Offload
from models.cases import Samples
from models.full_parameter_optimizers import ManuallyByMuon
from models.hand_written import Layers
from models.master_weights import ExactSums, HandWrittenMasters, ManualExactSums
from models.mixtures import Mixtral

LAYOUTS = {
    "one process": {},
    "tp2": {"tp": 2},
    "zero1": {"dp": 2, "strategy": {"zero_stage": 1}},
    "zero2": {"dp": 2, "strategy": {"zero_stage": 2}},
    "zero3": {"dp": 2, "strategy": {"zero_stage": 3}},
    "pp2": {"pp": 2},
    "offloaded zero3": {"dp": 2, "strategy": {"zero_stage": 3, "offload": "cpu"}},
    "zero2 in the backward": {"dp": 2, "strategy": {"zero_stage": 2, "optimizer_in_backward": True}},
    "tp2 x pp2 x zero3": {"tp": 2, "pp": 2, "dp": 2, "strategy": {"zero_stage": 3}},
}
FAST = {"one process", "tp2", "zero3", "pp2"}
layouts = pytest.mark.parametrize(
    "layout", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)


FILE = {"optimizer_states": f"disk:{tempfile.gettempdir()}"}


def by_sgd(parameters):
    return torch.optim.SGD(parameters, lr=2e-3, momentum=0.9)


def by_fast_sgd(parameters):  # so fast that each parameter moves in bfloat16, as the harness expects
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def by_adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=3e-3)


def by_lamb(parameters):
    return LAMB(parameters, lr=2e-3)


class ByNorm(torch.optim.SGD):
    """A class of a user, which combines all parameters, and reads them in full."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        squares = sum(p.grad.double().square().sum() + p.double().square().sum() for p in parameters)
        for p in parameters:
            p.sub_(p.grad / (1 + squares.sqrt().float()), alpha=0.05)
        super().step()
        return loss


def by_norm(parameters):
    return ByNorm(parameters, lr=2e-3, momentum=0.9)


# Optimizers that see all elements of a parameter, and other ways to shard.
MORE = {
    "Adafactor at owners of zero3": (by_adafactor, {"dp": 2, "strategy": {"zero_stage": 3}}),
    "LAMB over shards": (by_lamb, {"dp": 2, "strategy": {"zero_stage": 2}}),
    "a class of a user over zero3": (by_norm, {"dp": 2, "strategy": {"zero_stage": 3}}),
    "a class of a user over tp2": (by_norm, {"tp": 2}),
    "copies of shards": (by_fast_sgd, {"dp": 4, "strategy": {"zero_stage": 3, "shard_size": 2}}),
    "states in a file": (by_sgd, {"dp": 2, "strategy": {"zero_stage": 2, "offload": FILE}}),
}


class KeepsMasters(Callback):
    """The master weights of full parameters by FQN, on the first rank, before the first step and after the last."""

    def __init__(self):
        self.recorded = {}

    def on_train_start(self, trainer, pl_module):
        self.names = [name for name, _ in pl_module.named_parameters()]
        self.recorded["start"] = self.masters(trainer)

    def on_train_end(self, trainer, pl_module):
        self.recorded["end"] = self.masters(trainer)
        self.recorded["batches in stages"] = trainer.strategy.pipelined_batches

    def masters(self, trainer):
        state = trainer.strategy._state.optimizers.full_state(trainer.optimizers[0])  # in full, whatever is saved
        entries = state.get("state", {}).items()
        return {self.names[key]: v[MASTER_WEIGHT].clone() for key, v in entries if MASTER_WEIGHT in v}


def with_optimizer(module, make=by_sgd):
    module.configure_optimizers = lambda: make(module.parameters())


def with_masters_by_hand(module, make):
    module.optimizer_by_hand = HandWrittenMasters(module.parameters(), make)
    module.configure_optimizers = lambda: module.optimizer_by_hand


def masters_by_hand(run, make):
    """In one process: the float32 masters at the start and at the end, by FQN."""

    class Masters(Callback):
        def __init__(self):
            self.recorded = {}

        def on_train_start(self, trainer, pl_module):
            self.recorded["start"] = self.read(pl_module)

        def on_train_end(self, trainer, pl_module):
            self.recorded["end"] = self.read(pl_module)

        def read(self, module):
            names = [name for name, _ in module.named_parameters()]
            masters = [master.detach().clone() for master in module.optimizer_by_hand.masters]
            return dict(zip(names, masters, strict=True))

    return fit_reference(
        replace(run, callback=Masters, change=partial(with_masters_by_hand, make=make), precision="bf16-true")
    )


def plugin(**options):
    return {"plugins": [HybridPrecision("bf16-true", **options)]}


@layouts
def test_master_weights_match_the_reference(worlds, layout):
    assert_masters(worlds, by_sgd, LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_optimizers_and_shards_match_the_reference(worlds, name):
    make, layout = MORE[name]
    assert_masters(worlds, make, layout)


class BranchesLater(Layers):
    """Branches on a value from the third step on, so its stages are given up in the middle of the run."""

    def loss(self, batch):
        loss = super().loss(batch)
        return loss if self.global_step < 2 or loss > -1 else 2 * loss


@pytest.mark.slow
def test_master_weights_are_carried_to_another_layout(worlds):
    first = assert_masters(worlds, by_sgd, {"case": BranchesLater, "pp": 2})
    assert first.extra["batches in stages"][1] == 2


def by_fast_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.slow
def test_master_weights_of_experts_are_on_one_rank_each(worlds):
    """Routers decide by rounded scores, so no reference is near; parameters are their rounded master weights."""
    change = partial(with_optimizer, make=by_fast_adamw)
    run = Run(Mixtral, dp=2, ep=2, microbatches=1, change=change, callback=KeepsMasters, dtype=torch.bfloat16)
    first, second = worlds.run(2, fit, replace(run, trainer=plugin(master_weights=True)), timeout=300)
    assert first.extra["end"].keys() == first.grads[0].keys() | second.grads[0].keys()
    for name, master in first.extra["end"].items():
        assert torch.equal(first.state[name], master.bfloat16()) and torch.equal(second.state[name], first.state[name])


def assert_masters(worlds, make, layout):
    batches = {"num_batches": 6, "dtype": torch.bfloat16}
    options = {"change": partial(with_optimizer, make=make), "callback": KeepsMasters}
    run = Run(**{"case": "Layers", "trainer": plugin(master_weights=True), **options, **batches, **layout})
    [expected] = worlds.run(1, masters_by_hand, Run(run.case, dp=run.dp, **batches), make)
    first, *others = worlds.run(run.world_size, fit, run, timeout=300)
    assert first.extra["end"].keys() == expected.extra["end"].keys()
    for name, master in expected.extra["end"].items():
        here = first.extra["end"][name]
        assert here.dtype is torch.float32
        update = master - expected.extra["start"][name]
        # Gradients are sums of bfloat16 numbers, which differ in their order.
        assert float((here - master).norm()) < 0.03 * float(update.norm()), name
        assert torch.equal(first.state[name], here.bfloat16()), f"{name} is not its rounded master weight"
        for rank in others:
            assert torch.equal(rank.state[name], first.state[name])
    return first


def fit_exact(options, layout, epochs=1, resume=None, save=None, precision=None, kind=ExactSums):
    """On a rank: fit the module whose gradients are exact; the state, and master weights on the first rank."""
    replicas = layout.get("dp", 1)
    dtype = torch.bfloat16 if precision is None else torch.float32
    module = kind().to(dtype)
    keeps = KeepsMasters()
    how = plugin(**options) if precision is None else {"precision": precision}
    stages = layout.get("pp", 1)
    strategy = Hybrid3DStrategy(pipeline_parallel_size=stages, **layout.get("strategy", {}))
    own = {"max_epochs": epochs, "use_distributed_sampler": False, **how}
    trainer = trainer_of(replicas * stages, strategy, [keeps], **own)
    replica = trainer.strategy.cluster_environment.global_rank() % replicas
    data = [{"x": torch.full((1, 1), float(i % 5 - 1), dtype=dtype)} for i in range(8)]
    trainer.fit(module, DataLoader(data[replica::replicas], batch_size=4 // replicas), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return {name: value.clone() for name, value in module.state_dict().items()}, keeps.recorded


def test_stages_round_as_one_process(worlds):
    run = Run("Layers", dtype=torch.bfloat16, change=with_optimizer, num_batches=6)
    nearest, random = ({"trainer": plugin(**how)} for how in ({}, {"stochastic_rounding": True}))
    [one] = worlds.run(1, fit, replace(run, **random))
    [without] = worlds.run(1, fit, replace(run, **nearest))
    assert any(not torch.equal(without.state[name], value) for name, value in one.state.items())
    for rank in worlds.run(2, fit, replace(run, pp=2, **random)):
        assert all(torch.equal(rank.state[name], value) for name, value in one.state.items())


EXACT = {
    "shards instead of stages": {"pp": 2},
    "replicas": {"dp": 2},
    "zero1": {"dp": 2, "strategy": {"zero_stage": 1}},
    "zero2": {"dp": 2, "strategy": {"zero_stage": 2}},
    "zero3": {"dp": 2, "strategy": {"zero_stage": 3}},
    "zero3, offloaded": {"dp": 2, "strategy": {"zero_stage": 3, "offload": "cpu"}},
    "zero2, in the backward": {"dp": 2, "strategy": {"zero_stage": 2, "optimizer_in_backward": True}},
}


@pytest.mark.parametrize("options", [{"master_weights": True}, {"stochastic_rounding": True}], ids=str)
@pytest.mark.parametrize("layout", [n if n == "zero3" else pytest.param(n, marks=pytest.mark.slow) for n in EXACT])
def test_layouts_agree_bitwise_where_gradients_are_exact(worlds, layout, options):
    [(expected, masters)] = worlds.run(1, fit_exact, options, {}, 2)
    [(nearest, _)] = worlds.run(1, fit_exact, {}, {}, 2)
    assert any(not torch.equal(nearest[name], value) for name, value in expected.items())
    ranks = worlds.run(2, fit_exact, options, EXACT[layout], 2)
    for state, _ in ranks:
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert ranks[0][1]["end"].keys() == masters["end"].keys()
    assert all(torch.equal(ranks[0][1]["end"][name], master) for name, master in masters["end"].items())


@pytest.mark.parametrize("layout", ["replicas", "zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_manual_optimization_steps_master_weights(worlds, layout):
    options = {"master_weights": True}
    [(expected, masters)] = worlds.run(1, fit_exact, options, {}, 2)
    ranks = worlds.run(2, fit_manually, options, EXACT[layout])
    for state, _ in ranks:
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert all(torch.equal(ranks[0][1]["end"][name], master) for name, master in masters["end"].items())


def fit_manually(options, layout):
    return fit_exact(options, layout, 2, kind=ManualExactSums)


@pytest.mark.parametrize("saves_folder", [False, True], ids=["file", "folder"])
def test_checkpoints_have_master_weights_for_any_layout(worlds, tmp_path, saves_folder):
    path, options = str(tmp_path / "saved.ckpt"), {"master_weights": True}
    saving = {"dp": 2, "strategy": {"zero_stage": 3, "save_distributed_checkpoint": saves_folder}}
    straight, _ = worlds.run(2, fit_exact, options, saving, 2)[0]
    _, saved = worlds.run(2, fit_exact, options, saving, 1, None, path)[0]
    assert saved["end"]
    for layout, size in (({}, 1), ({"dp": 2, "strategy": {"zero_stage": 1}}, 2)):
        state, masters = worlds.run(size, fit_exact, options, layout, 2, path)[0]
        assert all(torch.equal(masters["start"][name], master) for name, master in saved["end"].items())
        assert all(torch.equal(state[name], value) for name, value in straight.items())


@pytest.mark.slow
def test_a_class_of_a_user_goes_on_with_its_master_weights(worlds, tmp_path):
    path, options, zero3 = str(tmp_path / "saved.ckpt"), {"master_weights": True}, EXACT["zero3"]
    _, straight = worlds.run(2, fit_by_norm, options, zero3, 2)[0]
    _, saved = worlds.run(2, fit_by_norm, options, zero3, 1, None, path)[0]
    _, masters = worlds.run(2, fit_by_norm, options, zero3, 2, path)[0]
    assert saved["end"] and masters["end"].keys() == straight["end"].keys()
    for name, master in saved["end"].items():
        assert torch.equal(masters["start"][name], master) and torch.equal(masters["end"][name], straight["end"][name])


def fit_by_norm(*arguments):
    return fit_exact(*arguments, kind=ExactSumsByNorm)


class ExactSumsByNorm(ExactSums):
    def __init__(self):
        super().__init__(ByNorm)


def resumed_with_warnings(options, layout, path, precision=None):
    with pytest.warns(UserWarning, match="the checkpoint has float32 master weights"):
        return fit_exact(options, layout, 1, path, None, precision)


def test_resumed_without_master_weights_and_with_them_again(worlds, tmp_path):
    zero3, options = {"dp": 2, "strategy": {"zero_stage": 3}}, {"master_weights": True}
    path, without = str(tmp_path / "masters.ckpt"), str(tmp_path / "without.ckpt")
    saved, masters = worlds.run(2, fit_exact, options, zero3, 1, None, path)[0]
    [(state, recorded)] = worlds.run(1, resumed_with_warnings, {}, {}, path)
    assert not recorded and all(torch.equal(state[name], value) for name, value in saved.items())
    [(state, _)] = worlds.run(1, resumed_with_warnings, {}, {}, path, "32-true")
    assert all(torch.equal(state[name], master) for name, master in masters["end"].items())
    # One more epoch without, then with them: they start at the parameters.
    [(other, _)] = worlds.run(1, fit_exact, {}, {}, 1, None, without)
    _, recorded = worlds.run(2, fit_exact, options, zero3, 2, without)[0]
    assert recorded["end"].keys() == other.keys()


def lines_and_bytes(options):
    """On a rank: the estimated bytes of states of the first rank, and those that there are."""
    from lightning_hybrid.run.description.memory import memory_of_stages

    module = ExactSums().bfloat16()
    trainer = trainer_of(2, Hybrid3DStrategy(zero_stage=3), [], **plugin(**options))
    found = {}

    class Measure(Callback):
        def on_train_batch_end(self, trainer, *_):
            run, optimizers = trainer.strategy.run, trainer.optimizers
            [memory] = memory_of_stages(run, optimizers, 1)
            tensors = [v for entry in optimizers[0].state.values() for v in entry.values() if v.dim()]
            found.update(estimated=memory.optimizer_states, present=sum(t.nbytes for t in tensors))

    trainer.callbacks.append(Measure())
    data = [{"x": torch.ones(1, 1, dtype=torch.bfloat16)} for _ in range(4)]
    trainer.fit(module, DataLoader(data, batch_size=2))
    return found


@pytest.mark.parametrize("options", [{"master_weights": True}, {"stochastic_rounding": True}, {}], ids=str)
def test_states_are_estimated_with_master_weights(worlds, options):
    first = worlds.run(2, lines_and_bytes, options)[0]
    elements = (3 * 4 + 4 + 17 * 2) * {"master_weights": 12, "stochastic_rounding": 8}.get(next(iter(options), ""), 4)
    assert first["present"] == elements
    assert abs(first["estimated"] - elements) <= 4 * 3 * 3  # counts of steps


def local_sgd():
    return LocalSGD(every=2)


REFUSED = {
    "averages parameters, and master_weights=True keeps": Run(
        "Layers", dp=2, change=with_optimizer, callback=local_sgd, trainer=plugin(master_weights=True)
    ),
    "stochastic_rounding=True: zero_stage with manual optimization": Run(
        ManuallyByMuon, dp=2, strategy={"zero_stage": 1}, trainer=plugin(stochastic_rounding=True)
    ),
    "ByNorm may combine parameters of several stages": Run(
        "Layers", pp=2, change=partial(with_optimizer, make=by_norm), trainer=plugin(master_weights=True)
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(worlds, words):
    run = replace(copy.copy(REFUSED[words]), dtype=torch.bfloat16)
    for text in worlds.run(2, refusal, fit, run):
        assert text.startswith(("PrecisionError", "LayoutError")) and words in text


def test_random_rounding_needs_the_places_of_elements():
    random, kept = (HybridPrecision("bf16-true", **{name: True}) for name in ("stochastic_rounding", "master_weights"))
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    offload, run = Offload({"optimizer_states": "cpu"}), SimpleNamespace
    offload.check_optimizers(run(setting=run(device=cpu, precision=random)), [])
    offload.check_optimizers(run(setting=run(device=cuda, precision=kept)), [])
    check_random_rounding(random, shards_manual_steps=False)
    check_random_rounding(kept, shards_manual_steps=True)
    with pytest.raises(PrecisionError, match="offload of optimizer states from cuda:0 steps copies"):
        offload.check_optimizers(run(setting=run(device=cuda, precision=random)), [])


def fit_by_lightning():
    """On a rank: the hand-written reference and master weights, both under Lightning's own strategy."""
    states = []
    for change, plugins in (
        (partial(with_masters_by_hand, make=by_sgd), plugin()),
        (with_optimizer, plugin(master_weights=True)),
    ):
        run = Run("Layers", dtype=torch.bfloat16, change=change, num_batches=4)
        states.append(fit_reference(replace(run, trainer=plugins)).state)
    return states


def test_a_strategy_of_lightning_steps_master_weights(worlds):
    [(expected, state)] = worlds.run(1, fit_by_lightning)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


YAML = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_hybrid.Hybrid3DStrategy
    init_args: {zero_stage: 2}
  plugins:
    - class_path: lightning_hybrid.HybridPrecision
      init_args: {precision: bf16-true, master_weights: true, reduce_dtype: float32, gather_dtype: bfloat16}
"""


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Samples("vectors", 12, torch.float32), batch_size=2)


class ByAdamW(Layers):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit_by_yaml(path):
    cli = LightningCLI(ByAdamW, Data, args=["fit", "--config", path], save_config_callback=None)
    precision = cli.trainer.precision_plugin
    has_masters = all(MASTER_WEIGHT in entry for entry in cli.trainer.optimizers[0].state.values())
    dtypes = {p.dtype for p in cli.model.parameters()}
    return precision.master_weights, precision.reduce_dtype, precision.gather_dtype, has_masters, dtypes


def test_options_in_yaml(worlds, tmp_path):
    (tmp_path / "config.yaml").write_text(YAML)
    for found in worlds.run(2, fit_by_yaml, str(tmp_path / "config.yaml"), timeout=120):
        assert found == (True, torch.float32, torch.bfloat16, True, {torch.bfloat16})


class ReplacesOptimizer(Layers):
    """Takes another optimizer after the first batch."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.trainer.strategy.optimizers = [by_sgd(self.parameters())]


def test_an_optimizer_that_replaces_the_connected_one_is_refused():
    module = ReplacesOptimizer().to(torch.bfloat16)
    trainer = trainer_of(1, Hybrid3DStrategy(), [], max_steps=3, **plugin(master_weights=True))
    with pytest.raises(StepError, match="SGD has taken the place of another optimizer") as caught:
        trainer.fit(module, *[DataLoader(Samples("vectors", 8, torch.bfloat16), batch_size=2)] * 2)
    assert caught.value.docs == "errors.md#optimizer-replaced"
