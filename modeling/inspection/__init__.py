"""Named places where tools read and change attention maps."""
