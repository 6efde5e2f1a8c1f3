"""What a run would need, before it begins: operations, memory, time and cost."""
