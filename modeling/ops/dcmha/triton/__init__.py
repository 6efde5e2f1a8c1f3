"""The op on CUDA devices: matrix products with Triton kernels between them that mix the heads."""
