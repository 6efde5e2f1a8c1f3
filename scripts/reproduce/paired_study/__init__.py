"""Shared parts of studies that compare arms: stored runs, tuned learning rates, paired differences, table and plot."""
