"""Tests on devices use them on ranks only."""

import pytest

from harness.worlds import cuda_in_this_process


@pytest.fixture(scope="session", autouse=True)
def _no_cuda_at_import():
    cuda_in_this_process.check("the import of a module")


@pytest.fixture(autouse=True)
def _no_cuda_in_this_process():
    with cuda_in_this_process.refused():
        yield
