"""Documents in one JSON Lines file for each source: `python corpus.py TEXTS corpus`.

TEXTS holds WikiText-2 (`wikitext2_valid.txt`, `wikitext2_test.txt`) and Tiny Shakespeare (`tinyshakespeare.txt`).
"""

import json
import re
import sys
import sysconfig
from pathlib import Path

from dynattn.scripts.common.builtin_corpus import builtin_documents

LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "pydoc_data"}

texts, output = Path(sys.argv[1]), Path(sys.argv[2])
wikitext = "".join((texts / f"wikitext2_{split}.txt").read_text() for split in ("valid", "test"))
shakespeare = (texts / "tinyshakespeare.txt").read_text().split("\n\n")
library = Path(sysconfig.get_path("stdlib"))
sources = sorted(path for path in library.rglob("*.py") if not LEFT_OUT & set(path.parts))
corpora = {
    "wikitext": [article for article in re.split(r"(?m)^(?= = [^=])", wikitext) if article.strip()],
    "shakespeare": ["\n\n".join(shakespeare[start : start + 40]) for start in range(0, len(shakespeare), 40)],
    "reference": builtin_documents("train") + builtin_documents("validation"),
    "library": [path.read_text(errors="ignore") for path in sources],
}
for name, documents in corpora.items():
    lines = (json.dumps({"text": document}) + "\n" for document in documents)
    (output / f"{name}.jsonl").write_text("".join(lines))
