"""Dynamically composable multi-head attention (arXiv 2405.08553): the op, its definition, its fast implementations."""
