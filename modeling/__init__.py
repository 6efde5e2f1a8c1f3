"""The models: one file a family, and the layers, caches, position schemes and ops that they are made of."""
