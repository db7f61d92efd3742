"""The strategy as an object that users save, copy and send with other arguments."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_hybrid import Hybrid3DStrategy


@pytest.mark.parametrize("again", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
def test_copy_before_a_run(again):
    other = again(Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=4, recompute="full"))
    assert vars(other).keys() == vars(Hybrid3DStrategy()).keys()
    assert repr(other.options) == repr(
        Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=4, recompute="full").options
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "Hybrid3DStrategy()"),
        (
            {"pipeline_parallel_size": 2, "zero_stage": 1, "schedule": "gpipe"},
            "Hybrid3DStrategy(pipeline_parallel_size=2, schedule='gpipe', zero_stage=1)",
        ),
        ({"zero_stage": 3, "compile": True}, "Hybrid3DStrategy(zero_stage=3, compile='units')"),
        ({"data_parallel_size": 2, "num_microbatches": "auto"}, "Hybrid3DStrategy(data_parallel_size=2)"),
        ({"zero_stage": 0, "recompute": None}, "Hybrid3DStrategy(zero_stage=0, recompute=None)"),
        ({"schedule": "auto", "chunked_loss": "auto"}, "Hybrid3DStrategy()"),
        ({"offload": {"optimizer_states": "cpu"}}, "Hybrid3DStrategy(offload={'optimizer_states': 'cpu'})"),
    ],
)
def test_repr_shows_the_options_that_differ_from_their_defaults(options, text):
    assert repr(Hybrid3DStrategy(**options)) == text


def test_repr_of_a_batch_is_short():
    text = repr(Hybrid3DStrategy(example_batch={"x": torch.randn(100, 100)}))
    assert text.startswith("Hybrid3DStrategy(example_batch={'x': ") and len(text) < 200


class TakesTrainerArguments(LightningModule):
    """As in forecasting libraries, which make the Trainer themselves."""

    def __init__(self, **trainer_kwargs):
        super().__init__()
        self.save_hyperparameters()


def test_saved_as_hyperparameter():
    module = TakesTrainerArguments(strategy=Hybrid3DStrategy(pipeline_parallel_size=2))
    assert isinstance(module.hparams["strategy"], Hybrid3DStrategy)
