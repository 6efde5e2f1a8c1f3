"""Ways to compose the maps of one chunk, behind one interface."""
