"""C sources, compiled on the machine where they run."""
