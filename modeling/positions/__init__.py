"""Position schemes: absolute positions, rotary embeddings, and biases and gains by distance."""
