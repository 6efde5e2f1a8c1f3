"""The configurations of the models: one file for each family, with fields and their validation only."""
