"""Estimates what a run would need before it begins: FLOPs, memory, time and cost."""
