"""Triton kernels for GPUs (Hopper first); ops.py says which tensors they take. Checked under Triton's interpreter."""
