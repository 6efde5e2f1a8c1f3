"""How a conversation becomes tokens in its chat template, of which those that the assistant says are targets."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ...common.errors import UserError, first_line
from .chat_template import digest_of
from .text_encoder import Encoded, TextEncoder

# With this tag a chat template says which parts the assistant generates.
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"


class ChatEncoder(TextEncoder):
    """Conversations, each the JSON of a list of messages, in the tokenizer's chat template.

    Only what the assistant says is a target. A template with the `generation` tag marks these parts. Without the tag, a
    turn of the assistant is the text that the template adds to the earlier turns and the generation prompt.
    """

    marks_targets = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self.knows_generation = bool(GENERATION_TAG.search(str(tokenizer.chat_template)))

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint} chat {digest_of(str(self.tokenizer.chat_template))}"

    def __call__(self, documents: list[str]) -> Encoded:
        """Encodes a batch of conversations."""
        conversations = [json.loads(document) for document in documents]
        encoded = [self.encode(conversation) for conversation in conversations]
        said = [
            self.said(turns, tokens[targets]) for turns, (tokens, targets) in zip(conversations, encoded, strict=True)
        ]
        return Encoded(
            np.concatenate([tokens for tokens, _ in encoded]),
            np.array([len(tokens) for tokens, _ in encoded]),
            sum(len(text.encode("utf-8", "surrogatepass")) for text in said),
            np.concatenate([targets for _, targets in encoded]),
        )

    def encode(self, turns: list[dict[str, Any]]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Tokens `[N]` of a conversation, and which of them the assistant says."""
        try:
            tokens, targets = self._by_tag(turns) if self.knows_generation else self._by_prefix(turns)
        except UserError:
            raise
        except Exception as error:  # a template is a program, and raises what it likes
            raise UserError(
                f"the chat template cannot render {json.dumps(turns)[:200]}: {first_line(error)}; correct it, or "
                "give messages with role and content that it knows"
            ) from error
        if not any(targets):
            raise UserError(f"the assistant says nothing in the conversation {json.dumps(turns)[:200]}; leave it out")
        return np.array(tokens, dtype=np.int32), np.array(targets, dtype=np.bool_)

    def said(self, turns: list[dict[str, Any]], targets: NDArray[np.int32]) -> str:
        """What the assistant says in a conversation whose targets are the tokens `targets` `[N]`.

        It is the content of its turns, without what the template adds, also where the tokenizer spells it in another
        way, such as in lower case. A template may trim turns, or leave out parts such as the reasoning of earlier ones;
        then it is whatever the targets spell.
        """
        content = [str(turn.get("content") or "") for turn in turns if turn["role"] == ASSISTANT]
        spelled = str(self.tokenizer.decode(targets.tolist(), skip_special_tokens=True))
        for texts in (content, [text.strip() for text in content]):
            if all(text in spelled or self._as_spelled(text) in spelled for text in texts):
                return "".join(texts)
        return spelled

    def _as_spelled(self, text: str) -> str:
        """What the tokenizer makes of a text."""
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _by_tag(self, turns: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        rendered: Any = self.tokenizer.apply_chat_template(
            turns, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
        )
        return rendered["input_ids"], rendered["assistant_masks"]

    def _by_prefix(self, turns: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        text = self._render(turns)
        spans = list(self._assistant_spans(turns, text))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        # Many tokenizers leave spaces out of the offsets: a token of spaces alone begins and ends where these end.
        targets = [
            any(begin <= first and begin < last <= end for begin, end in spans)
            for first, last in encoded["offset_mapping"]
        ]
        return encoded["input_ids"], targets

    def _assistant_spans(self, turns: list[dict[str, Any]], text: str) -> Iterator[tuple[int, int]]:
        """Where the assistant's turns begin and end in `text`, the rendered conversation."""
        for index, turn in enumerate(turns):
            if turn["role"] != ASSISTANT:
                continue
            before, after = self._render(turns[:index], prompt=True), self._render(turns[: index + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise UserError(
                    "the chat template renders earlier turns in another way once later ones follow, so that the "
                    "assistant's tokens cannot be found; mark them in it with {% generation %}"
                )
            yield len(before), len(after)

    def _render(self, turns: list[dict[str, Any]], prompt: bool = False) -> str:
        rendered: Any = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        return str(rendered)
