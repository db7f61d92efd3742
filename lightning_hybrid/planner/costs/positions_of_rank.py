"""The layout as one layer sees it, where context ranks do not divide the layer's positions: `layout_of_layer`."""

from __future__ import annotations

import dataclasses

from lightning_hybrid.planner.costs.layer_costs import LayerCosts
from lightning_hybrid.planner.plan_layout import PlanLayout


def layout_of_layer(layer: LayerCosts, layout: PlanLayout) -> PlanLayout:
    """Return the layout by whose sizes the layer's rows and activations are divided."""
    if layer.has_full_positions and layout.context > 1:
        return dataclasses.replace(layout, context=1)
    return layout
