"""C sources, compiled on the machine where they run, and the module that reads them."""
