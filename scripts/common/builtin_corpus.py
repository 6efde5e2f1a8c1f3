"""The built-in corpus: the language reference that ships inside CPython as `pydoc_data.topics`.

It is English text that every machine has without a download, about 0.4 MB after deduplication. Topics repeat each other
(the page "compound statements" holds the whole page on "if"), so every paragraph is kept once, in the longest page that
has it. The last tenth of each page's paragraphs is held out, and none of them occurs in the training split.
The text differs a little between Python versions; records name the version that they used.
"""

import platform
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Literal, get_args

Split = Literal["train", "validation"]
HELD_OUT_SHARE = 0.1  # of the paragraphs of each page
HELD_OUT_EVERY = 10  # every 10th conversation is held out
# A heading is a line with another below it that is made of one of these characters.
UNDERLINES = "*=-~^"


def builtin_documents(split: Split) -> list[str]:
    """Returns the documents of one split, in a fixed order.

    Raises:
        ValueError: `split` is neither "train" nor "validation".
    """
    _check_split(split)
    documents = []
    for paragraphs in _unique_pages():
        cut = len(paragraphs) - int(len(paragraphs) * HELD_OUT_SHARE)
        chosen = paragraphs[:cut] if split == "train" else paragraphs[cut:]
        if chosen:
            documents.append("\n\n".join(chosen) + "\n")
    return documents


def _check_split(split: str) -> None:
    if split not in get_args(Split):
        raise ValueError(f"the built-in corpus has the splits {get_args(Split)}, not {split!r}")


def builtin_conversations(split: Split) -> list[list[dict[str, str]]]:
    """Returns a question for each heading of the corpus, answered by the paragraph below it; every tenth is held out.

    Raises:
        ValueError: `split` is neither "train" nor "validation".
    """
    _check_split(split)
    return [
        [
            {"role": "user", "content": f"What does the language reference say about this? {heading}"},
            {"role": "assistant", "content": answer},
        ]
        for index, (answer, heading) in enumerate(_headings().items())
        if (index % HELD_OUT_EVERY == 0) == (split == "validation")
    ]


def builtin_corpus_name() -> str:
    """The corpus with its version, for records and model cards."""
    return f"pydoc_data.topics of CPython {platform.python_version()}"


def _unique_pages() -> Iterator[list[str]]:
    """Yields each page's paragraphs, longest page first, without those that an earlier page already has."""
    seen: set[str] = set()
    for _, text in sorted(topics.items(), key=lambda page: (-len(page[1]), page[0])):
        paragraphs = []
        for paragraph in text.split("\n\n"):
            fingerprint = " ".join(paragraph.split())
            if fingerprint and fingerprint not in seen:
                seen.add(fingerprint)
                paragraphs.append(paragraph.strip("\n"))
        yield paragraphs


def _headings() -> dict[str, str]:
    """The heading above each paragraph that directly follows one. Equal paragraphs keep the first of their headings.

    Paragraphs are joined to one line. A paragraph that begins with a space, as code does, counts as following none.
    """
    found: dict[str, str] = {}
    for _, text in sorted(topics.items()):
        heading = ""
        for paragraph in text.split("\n\n"):
            lines = paragraph.strip("\n").split("\n")
            if heading and not lines[0].startswith(" "):
                found.setdefault(" ".join(paragraph.split()), heading)
            underlined = len(lines) == 2 and lines[1][:3] in [3 * character for character in UNDERLINES]
            heading = lines[0] if underlined else ""
    return found
