"""The model families that can be upcycled: one module each."""
