import pytest

from harness.worlds import patches_left

pytest_plugins = ["harness.worlds.worlds_plugin"]


@pytest.fixture(autouse=True)
def _nothing_is_left_replaced():
    yield
    patches_left.check()
