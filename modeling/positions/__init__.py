"""Position schemes: rotary embedding and linear biases."""
