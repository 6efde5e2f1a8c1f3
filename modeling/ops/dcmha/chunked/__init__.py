"""The op in linear memory for any device: whole rows of scores for a few queries at a time."""
