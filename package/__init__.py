"""The front door: `import dynattn` registers every model family with the Auto classes."""
