"""The mixture-of-experts layer: routers, dispatch of tokens, grouped MLPs."""
