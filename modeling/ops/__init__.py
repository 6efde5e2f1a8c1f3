"""Pure functions on tensors: no parameters, no configuration objects."""
