"""DCFormer and DCPythia as the authors released them, to ours and back."""
