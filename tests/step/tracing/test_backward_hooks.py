"""Full backward hooks are set up around a forward that only one stage runs: steps with them are not partitioned."""

import pytest
from torch.nn.modules.module import register_module_full_backward_hook

from harness.one_process_pipeline import pipeline
from lightning_hybrid.errors import StepError
from models.cases import batch_of, make
from models.hand_written import Layers


def test_hook_on_a_module_is_refused_with_stages():
    module, batch = make(Layers), batch_of("vectors", range(4))
    module.layers[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(StepError, match=r"layers\.1 has a full backward hook"):
        pipeline(module, lambda: module.loss(batch), 2)


def test_global_hook_is_refused_with_stages():
    module, batch = make(Layers), batch_of("vectors", range(4))
    handle = register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(StepError, match="full backward hook around a module that another stage runs"):
            pipeline(module, lambda: module.loss(batch), 2)
    finally:
        handle.remove()
