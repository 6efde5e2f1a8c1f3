"""Converts a released plain model to a model with composed heads that has the same outputs."""
