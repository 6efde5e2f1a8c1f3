"""The modules that layers are made of, the link to Transformers' attention interface, and composed heads for others."""
