"""From texts to batches: documents, tokens, packing, order."""
