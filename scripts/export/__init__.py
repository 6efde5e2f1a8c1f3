"""`dynattn export`: a checkpoint as graphs for another runtime, with a proof that it generates the same tokens."""
