"""What the families share around their layers: inputs, the decoder's forward pass, heads, what Transformers is told."""
