"""Modules with parameters that a decoder layer is made of, and how they meet Transformers' attention interface."""
