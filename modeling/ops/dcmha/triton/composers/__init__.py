"""Ways to launch the kernels that mix the heads of a chunk, behind one interface."""
