"""Variants of a model, trained from the same seeds on the same data, and compared in pairs."""
