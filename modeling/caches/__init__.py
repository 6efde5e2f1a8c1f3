"""Cache layers: composition factors beside keys and values, and the memory of RCMHA models."""
