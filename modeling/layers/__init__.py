"""The modules that layers are made of, and the link to Transformers' attention interface."""
