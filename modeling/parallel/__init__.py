"""Several processes that compute one model together, in ways that composed heads need."""
