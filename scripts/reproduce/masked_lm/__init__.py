"""The study of masked language modeling: arms, runs, record."""
