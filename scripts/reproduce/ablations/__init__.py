"""The study of ablations: a language model without each term of the composition."""
