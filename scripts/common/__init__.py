"""What several jobs share: arguments, errors, checkpoint files, texts, measuring."""
