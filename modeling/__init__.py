"""The models: one file for each family, and the layers, caches, position schemes and ops that they are made of."""
