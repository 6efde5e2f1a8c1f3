"""What the families share around their layers: inputs, the forward pass of a decoder, flags for Transformers, heads."""
