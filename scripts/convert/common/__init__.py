"""What every conversion shares: names and transforms of tensors, reading and writing weights, comparing logits."""
