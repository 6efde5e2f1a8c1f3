"""Triton kernels, and the tiles that they are made of."""
