"""What a Python process imports when it starts: its path begins with this folder."""
