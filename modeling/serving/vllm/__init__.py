"""Causal models with composed heads in vLLM: its plugin, its model classes and its attention backend."""
