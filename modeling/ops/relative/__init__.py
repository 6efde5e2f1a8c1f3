"""Relative attention (RCMHA, arXiv 2308.03429): the op, its definition and its faster implementations."""
