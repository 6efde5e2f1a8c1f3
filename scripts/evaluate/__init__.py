"""Scoring with lm-eval: `main` takes a checkpoint, `harness.evaluate_model` a model object."""
