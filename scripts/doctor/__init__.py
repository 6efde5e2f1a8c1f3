"""`dynattn doctor`: what is installed here, what will serve, and what is missing."""
