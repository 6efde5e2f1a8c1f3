"""The op in linear memory for any device: complete rows of scores for a few queries at a time."""
