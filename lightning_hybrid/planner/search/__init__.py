"""The search for a layout: candidates, their predictions, the ranking, and the reasons against the others."""

from lightning_hybrid.planner.search.plans_and_rejections import Allowed, Plan, Rejection, SearchResult
from lightning_hybrid.planner.search.search_layouts import search_layouts

__all__ = ["Allowed", "Plan", "Rejection", "SearchResult", "search_layouts"]
