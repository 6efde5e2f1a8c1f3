"""The families with composed heads in vLLM: its plugin, its model class and its attention backend."""
