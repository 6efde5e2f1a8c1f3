"""The four-way comparison of the RCMHA paper, under one protocol and with training and validation kept apart."""
