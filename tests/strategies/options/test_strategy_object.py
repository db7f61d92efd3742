"""The strategy as an object that users save, copy and send with other arguments."""

import copy
import pickle

import pytest
from lightning.pytorch import LightningModule

from lightning_hybrid import Hybrid3DStrategy


@pytest.mark.parametrize("again", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
def test_copy_before_a_run(again):
    other = again(Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=4, recompute="full"))
    assert vars(other).keys() == vars(Hybrid3DStrategy()).keys()
    assert repr(other.options) == repr(
        Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=4, recompute="full").options
    )


class TakesTrainerArguments(LightningModule):
    """As in forecasting libraries, which make the Trainer themselves."""

    def __init__(self, **trainer_kwargs):
        super().__init__()
        self.save_hyperparameters()


def test_saved_as_hyperparameter():
    module = TakesTrainerArguments(strategy=Hybrid3DStrategy(pipeline_parallel_size=2))
    assert isinstance(module.hparams["strategy"], Hybrid3DStrategy)
