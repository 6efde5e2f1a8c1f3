"""Which models read a text in segments with a memory, and how long the segments may be."""

from transformers import PreTrainedConfig

from .errors import UserError


def check_memory(config: PreTrainedConfig, segment: int = 1) -> None:
    """Refuses a model that cannot read an arbitrarily long text in segments of `segment` tokens.

    Raises:
        UserError: the model has no memory, its memory is not bounded, or text and memory would need more positions
            than the model has.
    """
    if not hasattr(config, "memory_type"):
        raise UserError(
            f"carry_memory is for models whose cache is a memory, like rcmha, and {config.model_type} is none of them; "
            "leave it out"
        )
    if config.mem_len is None:
        raise UserError("carry_memory needs a memory of limited length, and mem_len=None keeps everything; set mem_len")
    if config.position_scheme == "learned":
        raise UserError(
            f"carry_memory reads on beyond the {config.max_position_embeddings} tokens that have learned positions; "
            "choose another position_scheme, or leave carry_memory out"
        )
    if segment > (longest := longest_segment(config)):
        raise UserError(
            f"a segment of {segment} tokens and its memory of mem_len={config.mem_len} exceed max_position_embeddings="
            f"{config.max_position_embeddings}; use segments of up to {longest} tokens"
        )


def longest_segment(config: PreTrainedConfig) -> int:
    """The most tokens that a model can read at once when its memory is full.

    Relative positions in a segment memory span the memory too, which leaves fewer for new tokens.
    """
    spans_memory = config.memory_type == "segment" and config.is_relative
    return config.max_position_embeddings - (config.mem_len if spans_memory else 0)
