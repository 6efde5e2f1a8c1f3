"""`dynattn doctor`: what is installed, which attention implementation is the default, and what is missing."""
