"""Two stages x two replicas x two tensor ranks of well-known architectures match single-process training."""

import functools

import pytest
from torch.utils.data import DataLoader

from harness import checkpoint_runs as checkpoint
from harness.fits import Run, assert_parity, fit, reference_of
from harness.sharded_fraction import RecordingRun, RecordsFraction, fraction_of
from harness.verification import call_quietly
from lightning_hybrid.verify import Experiment, Layout, Verification
from models.cases import CASES, Samples, make
from models.mixtures import Mixtral
from models.nano_gpt import NanoGPT
from models.resnet import ResNet

EIGHT = {"pp": 2, "dp": 2, "tp": 2}
MOST_SECONDS = 20.0  # for one unit; a tenth of that where nothing else runs
SLOW = pytest.mark.slow
MODELS = [  # a small one with tied weights is in the grid of tensor parallelism
    pytest.param(CASES["GPT2"], marks=SLOW),
    pytest.param(CASES["Llama"], marks=SLOW),
    pytest.param(CASES["T5"], marks=SLOW),
    pytest.param(CASES["Bert"], marks=SLOW),
    pytest.param(CASES["ViT"], marks=SLOW),
    pytest.param(Mixtral, marks=SLOW),
    pytest.param(NanoGPT, marks=SLOW),
    pytest.param(CASES["Encoder"], marks=SLOW),
]


def assert_fully_sharded(cut):
    assert cut.share == 1 and not cut.gathered, cut
    assert cut.seconds and max(cut.seconds.values()) < MOST_SECONDS, cut.seconds


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.__name__)
def test_parity_without_full_tensors(worlds, case):
    run = Run(case, **EIGHT)
    expected = reference_of(worlds, run)
    ranks = worlds.run(8, fit, run, timeout=180)
    assert_parity(ranks, expected, run)
    # The experts of Mixtral are batched; they are a matter of expert parallelism.
    assert_fully_sharded(fraction_of(make(case), ranks[0].plans, within="self_attn." if case is Mixtral else ""))


def images():
    return {"train_dataloaders": DataLoader(Samples("images", 24), batch_size=4)}


@pytest.mark.slow
def test_batch_statistics_and_paired_convolutions(worlds):
    """Each microbatch of each replica has its own statistics, and the reference runs these microbatches."""

    def run(n, function, /, *args, timeout):
        return worlds.run(n, call_quietly, function, args, timeout=timeout)

    recording_run = RecordingRun(run)
    experiment = Experiment(
        make_module=functools.partial(make, ResNet),
        make_data=images,
        steps=3,
        trainer={"callbacks": [RecordsFraction()]},
    )
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    report = Verification(experiment, run=recording_run, timeout=180).check(Layout("2x2x2", devices=8, strategy=sizes))
    assert report.outcome == "same" and report.steps == 3, str(report)
    assert {name.split(": ")[0] for name in recording_run.cut.why} == {"downsample.0.weight"}, recording_run.cut


@pytest.mark.slow
def test_clipping_counts_each_element_once(worlds):
    run = Run("Llama", **EIGHT, trainer={"gradient_clip_val": 0.05})
    expected = reference_of(worlds, run)
    assert_parity(worlds.run(8, fit, run, timeout=180), expected, run)
    norm = sum(grad.square().sum() for grad in expected.grads[0].values()).sqrt()
    assert abs(norm - 0.05) < 1e-4, "it did clip"


@pytest.mark.slow
def test_eight_rank_checkpoint_loads_on_any_number(worlds, tmp_path):
    path = str(tmp_path / "half.ckpt")
    eight = checkpoint.Layout(2, 2, tp=2)
    [(expected, steps)] = worlds.run(1, checkpoint.train, "GPT2", checkpoint.PLAIN, 2)
    worlds.run(8, checkpoint.train, "GPT2", eight, 1, None, path, timeout=180)
    [(state, _)] = worlds.run(1, checkpoint.train, "GPT2", checkpoint.PLAIN, 1)
    checkpoint.assert_same_state(checkpoint.load(path)["state_dict"], state)
    for layout in (checkpoint.PLAIN, checkpoint.TP2, checkpoint.PP2, eight):
        for state, reached in worlds.run(layout.world_size, checkpoint.train, "GPT2", layout, 2, path, timeout=180):
            assert reached == steps == 4, layout
            checkpoint.assert_same_state(state, expected)
