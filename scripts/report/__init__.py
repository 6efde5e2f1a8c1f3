"""The curves of runs on a page that needs nothing else."""
