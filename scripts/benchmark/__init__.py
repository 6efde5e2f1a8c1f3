"""Speed, memory and error of every attention path beside its strongest opponents, in one process; `main` runs it."""
