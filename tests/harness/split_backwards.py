"""A callback that lets small models split their backwards, and records the backwards of each batch."""

from lightning.pytorch import Callback

from lightning_hybrid.pipeline.runtime.split_backward import MIN_PRODUCTS_TO_DEFER
from lightning_hybrid.schedule import Kind


class LinearsOfAnySize(Callback):
    """Splits the backwards of these small models too; records the actions, as (stage, kind)."""

    def __init__(self):
        self.recorded = []

    def setup(self, trainer, pl_module, stage):
        self.before, MIN_PRODUCTS_TO_DEFER["cpu"] = MIN_PRODUCTS_TO_DEFER["cpu"], 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        spans = getattr(trainer.strategy, "spans", [])
        scheduled = [span.action for span in spans if span.action.kind not in (Kind.F, Kind.OPTIMIZER)]
        self.recorded.append([f"{action.stage}{action.kind.value}" for action in scheduled])

    def teardown(self, trainer, pl_module, stage):
        MIN_PRODUCTS_TO_DEFER["cpu"] = self.before
