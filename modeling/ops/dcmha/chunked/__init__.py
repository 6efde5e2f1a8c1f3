"""The op in linear memory for any device: a few queries at a time, with their scores for all keys."""
