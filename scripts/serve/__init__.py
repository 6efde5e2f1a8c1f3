"""`dynattn serve`: Transformers' HTTP server with our models."""
