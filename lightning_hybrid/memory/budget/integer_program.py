"""Integer programs whose variables are binary, but for the last ones, solved by HiGHS (`scipy.optimize.milp`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def minimize_binary(
    cost: ArrayLike,
    matrix: Any,
    least: ArrayLike,
    *,
    lower: ArrayLike = 0,
    upper: ArrayLike = 1,
    num_continuous: int = 0,
    seconds: float,
    gap: float = 1e-4,
) -> np.ndarray | None:
    """Return the vector ``x`` of least ``cost @ x`` with ``matrix @ x >= least``; None if none was found.

    Args:
        cost: Of shape ``(variables,)``.
        matrix: Of shape ``(constraints, variables)``, dense or sparse.
        least: Of shape ``(constraints,)``.
        lower: Of each variable, or of all.
        upper: Of each variable, or of all.
        num_continuous: How many of the variables, the last ones, are not binary.
        seconds: After which the best vector so far is returned.
        gap: Relative difference between the cost and its lower bound at which the search ends.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # a quarter of a second, for runs with a budget alone

    costs = np.asarray(cost, dtype=float)
    scale = float(np.abs(costs).max()) or 1.0
    found = milp(
        costs / scale,
        constraints=LinearConstraint(matrix, lb=least),
        integrality=np.arange(len(costs)) < len(costs) - num_continuous,
        bounds=Bounds(lower, upper),
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    return None if found.x is None else np.array(found.x)
