"""An error that ends a run is printed by the user's frames, once; the other ranks print one line."""

import re
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.launched_jobs import run
from lightning_hybrid.errors import LayoutError
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.step.tracing.lines import TorchCallSites
from lightning_hybrid.strategies.world.traces import shorten, trim

SCRIPT = """
import sys
from lightning.pytorch import Trainer
import lightning_hybrid
from models.tiny import Tiny, loader

class Model(Tiny):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.strategy.mesh.rank in {ranks}:
            raise ZeroDivisionError({message!r})
        return self.loss(batch)

def main():
    strategy = lightning_hybrid.Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=2, start_method={method!r})
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
                      strategy=strategy, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), loader(4))

main()
"""


def output_of(folder, message="on purpose", **values):
    path = Path(folder, "train.py")
    path.write_text(SCRIPT.format(message=message, **values))
    code, output, _ = run([sys.executable, str(path)])
    assert code != 0
    return output


def files_in(text):
    return set(re.findall(r'File "([^"]*)"', text))


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_one_rank_prints_frames_of_the_user(tmp_path, ranks):
    output = output_of(tmp_path, ranks=ranks, method="popen")
    assert output.count("Traceback") == 1
    assert files_in(output) == {str(tmp_path / "train.py")}
    assert output.count("ZeroDivisionError: on purpose\n") == (2 if ranks == [1] else 1), output
    [other] = re.findall(r"^rank \d .*(?:had to stop|stopped): .*\n", output, re.MULTILINE)
    if ranks == [1]:
        assert other == "rank 0 stopped: rank 1 failed: ZeroDivisionError: on purpose\n"
    else:
        assert other in [f"rank {1 - rank} stopped: rank {rank} failed (see there)\n" for rank in ranks]
        assert output.index("Traceback") < output.index(other)


def test_long_message_is_printed_by_its_rank_alone(tmp_path):
    output = output_of(tmp_path, ranks=[1], method="popen", message="on purpose " * 20)
    assert output.count("on purpose") == 40, output  # in the line of the source, and in the message
    assert "\nrank 0 stopped: rank 1 failed: ZeroDivisionError (see there)\n" in output


def test_a_line_of_a_rank_is_written_with_its_end(monkeypatch):
    written = []
    monkeypatch.setattr(sys.stderr, "write", written.append)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    shorten(error := ValueError("on purpose"), "rank 1 stopped: rank 0 failed (see there)")
    sys.excepthook(ValueError, error, None)
    assert written == ["rank 1 stopped: rank 0 failed (see there)\n"]


@pytest.mark.slow
def test_error_of_a_forked_rank_keeps_its_type(tmp_path):
    output = output_of(tmp_path, ranks=[1], method="fork")
    assert output.count("Traceback") == 1 and "ProcessRaisedException" not in output
    assert files_in(output) == {str(tmp_path / "train.py")}
    assert "ZeroDivisionError: on purpose\n" in output and "raised on rank 1:\n" in output


def frames_of(function):
    try:
        function()
    except Exception as error:
        return [Path(frame.filename).name for frame in traceback.extract_tb(trim(error).__traceback__)]
    raise AssertionError


def test_refusals_of_the_package_show_the_call():
    assert frames_of(lambda: ParallelLayout(pipeline_parallel_size=0)) == [Path(__file__).name] * 2
    with pytest.raises(LayoutError):
        ParallelLayout(pipeline_parallel_size=0)


def test_one_hook_keeps_no_error(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *given: shown.append(given))
    before = sys.excepthook
    for error in (ValueError("a"), ValueError("b")):
        shorten(error)
    hook = sys.excepthook
    assert hook.before is before
    try:
        nn.Linear(2, 2)(torch.zeros(3))
    except RuntimeError as error:
        frames = error.__traceback__
        hook(type(error), error, frames)
        assert shown == [(RuntimeError, error, frames)]
        shorten(error)
        hook(type(error), error, frames)
        _, _, trimmed = shown[1]
        assert len(traceback.extract_tb(trimmed)) < len(traceback.extract_tb(frames))


def test_errors_of_torch_show_the_call_and_where():
    found = frames_of(lambda: nn.Linear(2, 2)(torch.zeros(3)))
    assert found == [Path(__file__).name] * 2 + ["linear.py"]


def test_errors_of_intercepted_operations_show_the_call():
    with TorchCallSites():
        found = frames_of(lambda: torch.ones(2) @ torch.ones(3))
    assert found == [Path(__file__).name] * 2


def test_unexpected_errors_of_the_package_show_all_frames():
    found = frames_of(lambda: ParallelLayout(pipeline_parallel_size=2).data_rank("1"))
    assert found[-1] == "layout.py"


ONE_PROCESS = """
import sys
from lightning.pytorch import Trainer
import lightning_hybrid
from models.tiny import Tiny, loader

class Model(Tiny):
    def training_step(self, batch, batch_idx):
        raise ZeroDivisionError("on purpose")

strategy = lightning_hybrid.Hybrid3DStrategy({options})
trainer = Trainer(accelerator="cpu", devices={devices}, max_epochs=1, logger=False, enable_checkpointing=False,
                  strategy=strategy, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Model(), loader(4))
"""


@pytest.mark.parametrize(
    ("options", "devices", "words"),
    [
        ("", 1, "ZeroDivisionError: on purpose"),
        ("stage_widths=[3, 1]", 1, "needs a multiple of 4 ranks, but the world has 1; set devices=4"),
        ("schedule='1f2b'", 1, "zero_bubble_searched; did you mean '1f1b'?"),
        ("", 2, "this program came from python -c"),
        ("", "2, pipeline_parallel_size=2", "strategy=Hybrid3DStrategy(pipeline_parallel_size=2)"),
        ("", "2, gradient_clip_val='1'", "`gradient_clip_val` should be an int or a float"),
        ("precision_plugin=lightning_hybrid.HybridPrecision('bf17')", 2, "precision='bf17' is unknown"),
        ("strict_layout='no'", 2, "strict_layout='no'; use True or False"),
        ("precision_plugin='16-true'", 2, "use an object such as HybridPrecision('bf16-mixed')"),
        ("", "2, accumulate_grad_batches={0: 2}", "accumulate_grad_batches={0: 2}; use a whole number"),
    ],
    ids=["step", "sizes", "option", "no-file", "trainer", "clipping", "precision", "switch", "plugin", "accumulate"],
)
def test_errors_of_one_process_have_frames_of_the_user(options, devices, words):
    code, output, _ = run([sys.executable, "-c", ONE_PROCESS.format(options=options, devices=devices)])
    assert code != 0 and words in output
    assert files_in(output) == {"<string>"} and output.count('File "') <= 2, output


ANOMALY = SCRIPT.replace("num_microbatches=2", "data_parallel_size=2").replace(
    "devices=2", "devices=4, detect_anomaly=True"
)
NAN = "        batch['x'][0] /= 1 - self.trainer.strategy.mesh.rank % 2  # replica 1\n        return"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (NAN, "NaN or infinite values in batch['x']: "),
        ("        return 0 * (self.layers[0][0].weight * 0).sqrt().sum() +", "the batch is finite, so the step makes"),
    ],
    ids=["batch", "step"],
)
def test_anomaly_names_the_line_the_batch_and_what_to_do(tmp_path, fault, words):
    path = Path(tmp_path, "train.py")
    path.write_text(ANOMALY.replace("        return", fault).format(ranks=[], method="popen", message=""))
    code, output, _ = run([sys.executable, str(path)])
    assert code != 0 and "returned nan values" in output
    assert {Path(file).name for file in files_in(output)} <= {"train.py", "tiny.py"}, output
    assert output.count("Error detected in") == 0 and output.count("\n") < 60, output
    assert re.search(r"in batch 0 of replica \d, on rank \d, in the gradient of\n", output), output
    assert words in output, output
    assert all(re.fullmatch(r"rank \d stopped: rank \d failed.*", line) for line in others_in(output)), output


def others_in(output):
    return [line for line in output.splitlines() if re.match(r"rank \d", line)]
