"""What callers do with prompts and caches beyond `generate`: read prompts without padding, edit kept tokens."""
