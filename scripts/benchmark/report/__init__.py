"""Tables and plots of a record."""
