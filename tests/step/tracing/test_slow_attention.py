"""The switch of torch's fused inference kernels, which all threads share."""

import threading

import torch

from lightning_hybrid.step.standins.kernels import slow_attention


def test_blocks_of_two_threads_that_overlap():
    """The first to enter is the first to leave."""
    entered, left, found = threading.Event(), threading.Event(), []

    def second():
        with slow_attention():
            entered.set()
            assert left.wait(10)
            found.append(torch.backends.mha.get_fastpath_enabled())

    thread = threading.Thread(target=second)
    with slow_attention():
        thread.start()
        assert entered.wait(10)
    left.set()
    thread.join()
    assert found == [False] and torch.backends.mha.get_fastpath_enabled()
