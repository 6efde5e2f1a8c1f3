"""`dynattn report`: the curves of runs on a self-contained HTML page."""
