"""The parts into which the profile of a call of the chunked op is divided."""

MATMULS = ("multiply_heads", "add_to_heads")
# Functions of `chunk.py` and of composers, which are clocked.
CHUNK_FUNCTIONS = (*MATMULS, "softmax", "softmax_backward")
COMPOSER_FUNCTIONS = ("compose", "compose_backward")
REST, WHOLE, UNCLOCKED = "rest", "whole call", "without the clock"
# The part that a function of the op computes, by how many of a chunk's softmax steps are done. The backward pass first
# repeats the forward pass up to the probabilities.
FORWARD_PARTS = {
    ("multiply_heads", 0): "scores",
    ("compose", 0): "pre-composition",
    ("softmax", 0): "softmax",
    ("compose", 1): "post-composition",
    ("multiply_heads", 1): "output",
}
BACKWARD_PARTS = {
    ("multiply_heads", 0): "scores again",
    ("compose", 0): "pre-composition again",
    ("softmax", 0): "softmax again",
    ("compose", 1): "post-composition again",
    ("add_to_heads", 1): "value gradient",
    ("multiply_heads", 1): "probability gradient",
    ("compose_backward", 1): "post-composition backward",
    ("softmax_backward", 1): "softmax backward",
    ("compose_backward", 2): "pre-composition backward",
    ("multiply_heads", 2): "query gradient",
    ("add_to_heads", 2): "key gradient",
}
PART_FUNCTIONS = {part: function for parts in (FORWARD_PARTS, BACKWARD_PARTS) for (function, _), part in parts.items()}
# The last part of a chunk, in the forward and in the backward pass.
LAST_PARTS = ("output", "key gradient")
