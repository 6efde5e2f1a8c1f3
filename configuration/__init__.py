"""What a model is: one file a family, data and validation only."""
