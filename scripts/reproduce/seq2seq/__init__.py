"""The study of encoder-decoders: which attention of a DCBart gains from composition, and RCMHA's attention types."""
