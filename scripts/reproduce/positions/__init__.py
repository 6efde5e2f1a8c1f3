"""The study of position schemes: tasks, runs, record, plot."""
