"""Precision plugins of a strategy: this package's own in the place of Lightning's, or one of the user's."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision

from lightning_hybrid.precision.hybrid import HybridPrecision
from lightning_hybrid.strategies.distributed_checkpoints import FolderStrategy


class PrecisionStrategy(FolderStrategy):
    """Knows how a precision works over several ranks."""

    @property
    def precision_plugin(self) -> Precision:
        """The precision: ours for one of Lightning's; one of the user's own serves where each rank has whole steps."""
        if self._precision_plugin is None:
            self._precision_plugin = HybridPrecision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and not HybridPrecision.is_other(plugin):
            plugin = HybridPrecision.of(plugin)
        self._precision_plugin = plugin

    @property
    def mesh_precision(self) -> HybridPrecision:
        """The precision over several ranks.

        Raises:
            TypeError: It has behaviour of its own.
        """
        plugin = self.precision_plugin
        return plugin if isinstance(plugin, HybridPrecision) else HybridPrecision.of(plugin)

    def setup_environment(self) -> None:
        """Join the world; a precision plugin that cannot be shared out is refused first."""
        if self._needs_runner():
            _ = self.mesh_precision
        super().setup_environment()
