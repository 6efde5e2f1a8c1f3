"""Studies that run from one command and end in a table and a plot."""
