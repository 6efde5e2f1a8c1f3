"""What a model does: operations, composition, caches and the Transformers classes."""
