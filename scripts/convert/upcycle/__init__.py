"""A released plain model becomes one with composed heads that starts as its equal."""
