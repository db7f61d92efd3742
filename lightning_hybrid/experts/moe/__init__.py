"""Mixture-of-experts layer: routers, token dispatch, grouped MLPs, upcycling of dense MLPs."""
