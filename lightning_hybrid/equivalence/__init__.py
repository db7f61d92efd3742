"""Comparison of a copy of a layer with the layer: is it the same function?"""
