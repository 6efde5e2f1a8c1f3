"""Constants of the official RCMHA code."""

POSITIONS = 2**12  # half the rows of its position tables
KERNEL_SIZE = 3  # width of its convolutions, in tokens
