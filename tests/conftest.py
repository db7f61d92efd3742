import sys

import pytest

from harness.worlds import leaked_patches

pytest_plugins = ["harness.worlds.worlds_plugin"]


@pytest.fixture(autouse=True)
def _no_patches_left():
    yield
    leaked_patches.check()


@pytest.fixture(autouse=True)
def _no_process_group_left():
    """A run in the test's own process leaves its group, as with Lightning's strategies."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
