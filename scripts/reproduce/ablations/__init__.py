"""The study of ablations: language models that each lack a term of the composition."""
