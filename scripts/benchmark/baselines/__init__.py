"""Other ways to compute the same, which ours is compared with."""
