"""What is measured: one module for each subject of a record."""
