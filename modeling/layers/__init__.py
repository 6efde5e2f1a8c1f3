"""The modules that a decoder layer is made of, and the link to Transformers' attention interface."""
