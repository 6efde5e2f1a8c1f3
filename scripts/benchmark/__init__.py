"""Time, memory and error of every attention implementation beside the strongest baselines; `main` runs it."""
