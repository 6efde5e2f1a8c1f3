"""How several processes compute one model: what no library of parallel training does for composed heads."""
