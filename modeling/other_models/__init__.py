"""Composed heads for models and modules that are not of this package: drop-in modules and adapters."""
