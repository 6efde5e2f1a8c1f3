"""What studies of arms share: runs that are kept, a learning rate for each arm, paired differences, table and plot."""
