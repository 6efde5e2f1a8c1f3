"""`dynattn inspect`: what composing does to the heads of a model on a text."""
