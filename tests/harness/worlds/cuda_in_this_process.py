"""Checks that CUDA is not initialized in pytest's own process: what is forked from there could not use it."""

import contextlib
from collections.abc import Iterator

import torch


def check(what: str) -> None:
    """Fail with what to do if CUDA is initialized."""
    assert not torch.cuda.is_initialized(), (
        f"{what} has initialized CUDA in pytest's own process; use the device on a rank: mark the test with"
        " @pytest.mark.world(1), or call worlds.run(1, function, ...)"
    )


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Fail the test that initializes CUDA, and not those after it."""
    before = torch.cuda.is_initialized()
    yield
    if not before:
        check("this test")
