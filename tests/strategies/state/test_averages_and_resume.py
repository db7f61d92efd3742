"""Files of Lightning's features, and runs that resume from them under this layout or another."""

import os
import signal

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, DistributedSampler

from harness.feature_runs import LAYOUTS, SHARED_OUT, Run, check, compare, on_rank, refusal
from harness.layouts import each_under_names, under_names
from lightning_hybrid.callbacks import GradientCompression
from models.tiny import Samples
from models.transfer_learning import Net

EVERYWHERE = under_names(LAYOUTS)
STAGES = under_names({name: LAYOUTS[name] for name in ("pp2", "dp2 x pp2")})

# -- averages in files ------------------------------------------------------------------------------------------------


def flat(state, prefix):
    """Numbers by name, however deep."""
    if isinstance(state, dict):
        items = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        items = [(str(index), value) for index, value in enumerate(state)]
    else:
        return {prefix: state} if isinstance(state, torch.Tensor | int | float) else {}
    return {name: value for key, item in items for name, value in flat(item, f"{prefix}.{key}").items()}


def averages(kind):
    if kind == "swa":
        return StochasticWeightAveraging(0.02, 1, 2)
    return EMAWeightAveraging(decay=0.7, device="cpu" if kind == "ema" else None, use_buffers=True)


class SavedAverage:
    """Saves after the first epoch of three, resumes in a new run, and validates at the end."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, run):
        norm = self.kind == "ema of buffers"
        path = f"{run.folder}/half.ckpt"
        unsplit = {"microbatches": 1} if norm else {}
        trainer = run.trainer(callbacks=[averages(self.kind), Saves(path, 5)], max_epochs=3, **unsplit)
        trainer.fit(Net(norm=norm), run.data(), run.val_data())
        trainer.strategy.barrier()
        state = torch.load(path, weights_only=False)
        shown = {key: value for key, value in state.items() if key not in ("hybrid3d", "hyper_parameters", "loops")}
        if self.kind != "swa":
            assert any(not torch.equal(state["state_dict"][k], v) for k, v in state["current_model_state"].items())
        module = Net(norm=norm)
        trainer = run.trainer(callbacks=[averages(self.kind)], max_epochs=3, **unsplit)
        trainer.fit(module, run.data(), run.val_data(), ckpt_path=path)
        numbers = run.numbers(trainer, module)
        [found] = trainer.validate(module, run.val_data(), verbose=False)
        return {**numbers, **flat(shown, "file"), **flat(found, "validated")}

    def __hash__(self):
        return hash(self.kind)

    def __eq__(self, other):
        return self.kind == other.kind


class Saves(Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@each_under_names("kind", ["swa", "ema"], LAYOUTS, replicated=[])
def test_averages_are_saved_full_and_resumed(worlds, tmp_path, kind, layout):
    check(worlds, tmp_path, SavedAverage(kind), layout)


def test_averages_of_buffers(worlds, tmp_path):
    check(worlds, tmp_path, SavedAverage("ema of buffers"), "pp2")


def swa_of_batch_norm(run):
    """One more pass over the data sets the statistics of the averaged weights."""
    module = Net(norm=True)
    trainer = run.trainer(callbacks=[StochasticWeightAveraging(0.02, 1, 1)], max_epochs=3, microbatches=1)
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module)


def test_swa_of_batch_norm(worlds, tmp_path):
    check(worlds, tmp_path, swa_of_batch_norm, "pp2")


def test_swa_of_batch_norm_over_replicas(worlds, tmp_path):
    """Each replica has its own statistics; logs and the end of training match one process."""
    [expected] = worlds.run(1, on_rank, swa_of_batch_norm, 1, 1, str(tmp_path / "one"))
    for result in worlds.run(2, on_rank, swa_of_batch_norm, 2, 1, str(tmp_path / "two")):
        assert result.keys() == expected.keys()
        assert result["steps"] == expected["steps"] and len(result["losses"]) == len(expected["losses"])
        assert float(result["losses"][-1]) == pytest.approx(float(expected["losses"][-1]), rel=0.5)


def search_and_average(run):
    """The search saves, trains and reads the file again, with an average of the weights."""
    module = Net()
    finder = LearningRateFinder(num_training_steps=6, min_lr=1e-3, max_lr=0.5)
    trainer = run.trainer(callbacks=[finder, averages("ema")], max_epochs=2)
    trainer.fit(module, run.data(), run.val_data())
    return run.numbers(trainer, module, chosen=module.lr)


@under_names({**{name: LAYOUTS[name] for name in ("pp2", "dp2 x pp2")}, **SHARED_OUT}, also=SHARED_OUT)
def test_lr_finder_with_an_average(worlds, tmp_path, layout):
    check(worlds, tmp_path, search_and_average, layout)


class Unseeded(Net):
    def __init__(self):
        super().__init__()
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)


def same_start(run):
    """Ranks that draw other weights average from those of the first."""
    module = Unseeded()
    trainer = run.trainer(callbacks=[averages("ema")], num_sanity_val_steps=2, max_epochs=1)
    trainer.fit(module, run.data(), run.val_data())
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_averages_start_equal_on_all_ranks(worlds, tmp_path):
    first, *others = worlds.run(4, on_rank, same_start, 4, 2, str(tmp_path))
    for other in others:
        compare(other, first, rtol=0, atol=0)


# -- resuming ---------------------------------------------------------------------------------------------------------


class Stateful:
    """A loader with a position, as torchdata's; batches are a function of it."""

    def __init__(self, run):
        # The user shards a custom loader over replicas.
        replicas = run.size // run.pp
        sampler = DistributedSampler(range(32), replicas, torch.distributed.get_rank() % replicas, seed=5)
        self.loader, self.position = DataLoader(Samples(32), 8 // replicas, sampler=sampler), 0

    def __iter__(self):
        begin = self.position % len(self)
        for index, batch in enumerate(self.loader):
            if index >= begin:
                self.position = index + 1
                yield batch

    def __len__(self):
        return len(self.loader)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def finetuning(run):
    return BackboneFinetuning(1, backbone_initial_ratio_lr=0.1, lambda_func=double)


def double(epoch):
    return 2.0


class Resumed:
    """From the middle of an epoch to the end; `stateful` loaders begin at the saved position."""

    def __init__(self, stateful, callback=None):
        self.stateful, self.callback = stateful, callback

    def fit(self, run, module, *callbacks, **options):
        data = Stateful(run) if self.stateful else run.data()
        more = [self.callback(run)] if self.callback else []
        trainer = run.trainer(callbacks=[*callbacks, *more], max_epochs=2)
        trainer.fit(module, data, run.val_data(), **options)
        return trainer

    def save(self, run):
        self.fit(run, Net(), Saves(f"{run.folder}/half.ckpt", 6))

    def resume(self, run):
        module = Net()
        trainer = self.fit(run, module, ckpt_path=f"{run.folder}/half.ckpt")
        return run.numbers(trainer, module)


CASES = {"loader": Resumed(False), "stateful loader": Resumed(True), "finetuning": Resumed(False, finetuning)}


COVERED = [LAYOUTS["pp2"], LAYOUTS["dp2"]]  # by replicas of stages


@pytest.mark.parametrize(
    "layouts", [[(1, 1), (4, 2)], pytest.param(COVERED, marks=pytest.mark.slow)], ids=["", "covered"]
)
@pytest.mark.parametrize("case", CASES)
def test_resume_mid_epoch_under_every_layout(worlds, tmp_path, case, layouts):
    """Saved under one layout, resumed under all."""
    resumed = CASES[case]
    folder = str(tmp_path)
    worlds.run(1, on_rank, resumed.save, 1, 1, folder)
    [expected] = worlds.run(1, on_rank, resumed.resume, 1, 1, folder)
    assert expected["steps"] == 8
    for saving in (None, "dp2 x pp2"):
        if saving is not None:
            worlds.run(4, on_rank, resumed.save, 4, 2, folder)
        for size, pp in layouts if saving else [(2, 2)]:
            for result in worlds.run(size, on_rank, resumed.resume, size, pp, folder):
                compare(result, expected, rtol=1e-9)


# -- SLURM ------------------------------------------------------------------------------------------------------------


class Interrupted(Callback):
    """Some ranks get the signal, in the middle of a step."""

    def __init__(self, ranks):
        self.ranks = ranks

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if trainer.global_step == 3 and int(os.environ["SLURM_PROCID"]) in self.ranks:
            os.kill(os.getpid(), signal.SIGUSR1)


def requeued(run, ranks):
    rank = torch.distributed.get_rank()
    tools = f"{run.folder}/bin"
    os.makedirs(tools, exist_ok=True)
    if rank == 0:
        with open(f"{tools}/scontrol", "w") as script:
            script.write(f'#!/bin/sh\necho "$@" >> {run.folder}/calls\n')
        os.chmod(f"{tools}/scontrol", 0o755)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": str(run.size), "SLURM_LOCALID": str(rank)}
    slurm |= {"SLURM_PROCID": str(rank), "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": str(run.size)}
    os.environ.update(slurm, PATH=f"{tools}:{os.environ['PATH']}")
    before = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        module = Net()
        trainer = run.trainer(
            callbacks=[Interrupted(ranks)], plugins=[SLURMEnvironment(auto_requeue=True)], max_epochs=2
        )
        trainer.fit(module, Stateful(run), run.val_data())
        first = run.numbers(trainer, module)
        module = Net()
        again = run.trainer(plugins=[SLURMEnvironment(auto_requeue=True)], max_epochs=2)
        again.fit(module, Stateful(run), run.val_data())
        return first, run.numbers(again, module), again.ckpt_path, len(run.recorder.rates)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("pp2", (1,)),
        pytest.param("pp2", (0,), marks=pytest.mark.slow),
        pytest.param("dp2", (1,), marks=pytest.mark.slow),
        ("dp2 x pp2", (0, 1, 2, 3)),
        pytest.param("dp2 x pp2", (2,), marks=pytest.mark.slow),
    ],
)
def test_preempted_slurm_job_is_saved_and_requeued(worlds, tmp_path, layout, ranks):
    size, pp = LAYOUTS[layout]
    folder = str(tmp_path)
    for first, second, path, batches in worlds.run(size, requeued, Run(size, pp, folder), ranks, timeout=30):
        assert path == f"{folder}/hpc_ckpt_1.ckpt"
        assert batches == first["steps"] - torch.load(path, weights_only=False)["global_step"] > 0
        wanted = [name for name in first if name.startswith("parameter")]
        compare({n: second[n] for n in wanted}, {n: first[n] for n in wanted}, rtol=0, atol=0)
    assert (tmp_path / "calls").read_text() == "requeue 17\n"
    assert torch.load(path, weights_only=False)["state_dict"].keys() == Net().state_dict().keys()


# -- refused by name --------------------------------------------------------------------------------------------------


class Sized(Net):
    batch_size = 2

    def train_dataloader(self):
        return DataLoader(torch.ones(16, 4), self.batch_size)


def batch_size_finder(run):
    run.trainer(callbacks=[BatchSizeFinder(), GradientCompression()], microbatches=1).fit(Sized())


def pruning(run, **strategy):
    pruned = ModelPruning("l1_unstructured", amount=0.5)
    run.trainer(callbacks=[pruned], strategy_options=strategy).fit(Net(), run.data())


def pruning_shards(run):
    pruning(run, zero_stage=1)


def pruning_over_tensor_ranks(run):
    pruning(run, tensor_parallel_size=2)


def pruning_microbatches(run):
    pruning(run, num_microbatches=2)


def test_batch_size_finder_is_refused_with_compressed_gradients(worlds, tmp_path):
    for message in refusal(worlds, tmp_path, batch_size_finder, "dp2"):
        assert message.startswith("ValueError: BatchSizeFinder") and "remove GradientCompression" in message, message


@STAGES
def test_pruning_is_refused_with_stages(worlds, tmp_path, layout):
    for message in refusal(worlds, tmp_path, pruning, layout):
        assert message.startswith("ValueError: ModelPruning") and "after fit" in message, message


@pytest.mark.parametrize("feature", [pruning_shards, pruning_over_tensor_ranks, pruning_microbatches])
def test_pruning_is_refused_with_shared_or_recorded_layers(worlds, tmp_path, feature):
    for message in refusal(worlds, tmp_path, feature, "dp2"):
        assert message.startswith("ValueError: ModelPruning") and "after fit" in message, message


# -- one writer -------------------------------------------------------------------------------------------------------


class Writes(TorchCheckpointIO):
    def __init__(self):
        self.keys = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.keys.append(sorted(checkpoint["state_dict"]))


def written_in_a_hook(run):
    writes = Writes()
    run.trainer(callbacks=[Saves("half.ckpt", 2)], plugins=[writes]).fit(Net(), run.data(), run.val_data())
    return writes.keys


@EVERYWHERE
def test_file_saved_by_a_hook_is_written_by_one_rank(worlds, tmp_path, layout):
    size, pp = LAYOUTS[layout]
    first, *others = worlds.run(size, on_rank, written_in_a_hook, size, pp, str(tmp_path))
    assert first == [sorted(Net().state_dict())]
    assert others == [[]] * (size - 1)
