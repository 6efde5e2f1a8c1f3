"""HTML pages that are a single file, with text, tables and embedded pictures."""

import base64
from collections.abc import Sequence
from html import escape

STYLE = """\
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 82rem; margin: 2rem auto; padding: 0 1.5rem; color: #222;
  background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
.gallery { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem; }
.gallery svg, img { max-width: 100%; height: auto; } .gallery svg { width: 100%; }
figure { margin: 0 1rem 1rem 0; }
figcaption { color: #555; font-size: .9rem; max-width: 40rem; }
"""
DOCTYPE = "<!doctype html>"


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page; `parts` are the HTML that the other functions of this module return."""
    head = f'<meta charset="utf-8">\n<title>{escape(title)}</title>\n<style>\n{STYLE}</style>'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return f'{DOCTYPE}\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def heading(text: str) -> str:
    """The heading of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain texts."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in header)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"


def gallery(charts: Sequence[str | None]) -> str:
    """Charts as SVG side by side; empty if there are none."""
    drawn = [f"<figure>{chart}</figure>" for chart in charts if chart is not None]
    return f'<div class="gallery">{"".join(drawn)}</div>' if drawn else ""


def picture(png: bytes, caption: str) -> str:
    """The content of a PNG file with its caption, which is also its text for screen readers."""
    data = base64.b64encode(png).decode("ascii")
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(caption)}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"
