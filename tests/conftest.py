import pytest

from harness.worlds import leaked_patches

pytest_plugins = ["harness.worlds.worlds_plugin"]


@pytest.fixture(autouse=True)
def _no_patches_left():
    yield
    leaked_patches.check()
