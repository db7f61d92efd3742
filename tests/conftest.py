import patches_left
import pytest

pytest_plugins = ["worlds_plugin"]


@pytest.fixture(autouse=True)
def _nothing_is_left_replaced():
    yield
    patches_left.check()
