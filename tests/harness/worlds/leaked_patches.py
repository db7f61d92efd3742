"""Checks that the patches of ``lightning_hybrid.patching`` are undone after each test, here and on the ranks."""

import gc
import sys


def check():
    """Fail with owner, name and reason of each attribute that is still replaced; these are no longer counted after."""
    patching = sys.modules.get("lightning_hybrid.patching")  # a test that has not loaded it need not now
    if patching and patching.active_patches():
        gc.collect()  # one that lasts as long as an error does
    left = patching.active_patches() if patching else []
    if patching:
        patching._functions.clear()
        patching._values.clear()
        patching._others.clear()
    assert not left, "left replaced: " + "; ".join(f"{owner}: {name} ({reason})" for owner, name, reason in left)
