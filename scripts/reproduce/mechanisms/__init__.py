"""The study of mechanisms: small tasks on which mixing heads is predicted to matter."""
