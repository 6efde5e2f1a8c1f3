"""The study of DCViT on small images: what dynamic composition, static matrices and query-key norms do, each alone."""
