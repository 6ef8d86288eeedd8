"""Tensor operations. Each has one door, a plain-torch reference, a CPU path, a test and (later) a Triton path.

This file holds a docstring and nothing else: `transformers` and `diffusers` probe for a package called `kernels`.
"""
