"""How candidates are run side by side: settings, inputs, rounds, correctness, tuning."""
