"""The configurations of the models: one file a family, data and validation only."""
