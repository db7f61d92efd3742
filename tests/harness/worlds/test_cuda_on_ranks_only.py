"""CUDA is initialized on ranks only, neither in pytest's own process nor in that which ranks are forked from."""

import importlib.util
import sys

import pytest
import torch

from harness.worlds import cuda_in_this_process
from harness.worlds.worlds_plugin import Worlds


def test_initialized_by_a_test(monkeypatch):
    """The test fails, and the next one does not."""
    with cuda_in_this_process.refused():
        pass
    guard = cuda_in_this_process.refused()
    guard.__enter__()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AssertionError, match=r"this test has initialized CUDA .* worlds\.run\(1, function, \.\.\.\)"):
        guard.__exit__(None, None, None)
    with cuda_in_this_process.refused():
        pass


def loaded():
    return [name for name in ("torchao", "transformers.models.llama.modeling_llama") if name in sys.modules]


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None or importlib.util.find_spec("transformers") is None,
    reason="needs torchao and transformers",
)
def test_ranks_start_without_torchao():
    """Its import initializes CUDA where there is a device; transformers would import it."""
    worlds = Worlds(capture=True)  # a rank that has run no test
    try:
        assert worlds.run(1, loaded) == [["transformers.models.llama.modeling_llama"]]
    finally:
        worlds.stop()
