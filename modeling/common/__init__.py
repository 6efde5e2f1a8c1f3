"""What the families share around their layers: inputs, forward passes of decoders and encoders, heads, flags."""
