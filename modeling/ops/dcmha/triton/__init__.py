"""The op on CUDA devices: matrix products of the vendor's library around Triton kernels that mix the heads."""
