"""RCMHA and its baselines as their authors' code stores them, to ours and back."""
