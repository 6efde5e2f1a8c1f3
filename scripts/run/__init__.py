"""`dynattn run`: commands of other packages, whose Python processes know the models of this one."""
