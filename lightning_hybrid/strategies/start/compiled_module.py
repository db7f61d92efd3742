"""A module that the user passes to the Trainer compiled, ``trainer.fit(torch.compile(module))``: compiled by layers.

Lightning replaces the module's steps by compiled ones, and refuses strategies that it does not know. A step that is one
function cannot be partitioned, sharded or split into microbatches, and its layers can be compiled one by one.
"""

from __future__ import annotations

from typing import Any

_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def uncompiled(module: Any) -> dict[str, Any] | None:
    """Give a module its own steps back; return the options with which the user compiled it; None if it is not."""
    compiled = getattr(module, "_compiler_ctx", None)
    if compiled is None:
        return None
    for name in _STEPS:
        original = compiled[f"original_{name}"]
        setattr(module, name, original)
        if getattr(original, "__func__", None) is getattr(type(module), name, None):
            del vars(module)[name]  # found on the class, as before
    module._compiler_ctx = None
    return _options_of(compiled["dynamo_ctx"])


def _options_of(context: Any) -> dict[str, Any]:
    """The arguments of ``torch.compile``, from what it made of them; defaults where a version of torch keeps others."""
    options = {"dynamic": getattr(context, "_dynamic", None), "fullgraph": getattr(context, "fullgraph", None) or None}
    backend: Any = getattr(context, "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    if hasattr(backend, "compiler_fn"):
        options["backend"] = backend.compiler_fn
    elif config := getattr(backend, "config", None):  # of inductor; a mode is one of them
        options["options"] = dict(config)
    return {name: value for name, value in options.items() if value is not None}
