"""What a run leaves behind: folder, checkpoints, metrics, throughput."""
