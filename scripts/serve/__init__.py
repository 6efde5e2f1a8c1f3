"""`dynattn serve`: Transformers' HTTP server with the models of this package."""
