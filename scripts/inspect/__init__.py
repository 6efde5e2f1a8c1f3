"""`dynattn inspect`: shows how a model composes its heads on a text."""
