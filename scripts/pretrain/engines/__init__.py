"""How the weights of a run are shared out over its processes: whole, in shards, or by DeepSpeed."""
