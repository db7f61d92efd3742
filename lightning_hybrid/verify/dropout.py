"""Modules without dropout, for comparisons whose sides draw what they drop by other rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn.modules.dropout import _DropoutNd


@dataclass(frozen=True)
class WithoutDropout:
    """Makes a module that drops nothing; picklable if the given function is.

    Attributes:
        make_module: Makes the LightningModule.
    """

    make_module: Callable[[], Any]

    def __call__(self) -> Any:
        """Make the module, with each probability of its layers that is named so set to 0."""
        module = self.make_module()
        for layer in module.modules():
            for name, value in list(vars(layer).items()):
                if type(value) is float and ("drop" in name or isinstance(layer, _DropoutNd)):
                    setattr(layer, name, 0.0)
        return module
