"""The study of upcycling: runs, record, plot."""
