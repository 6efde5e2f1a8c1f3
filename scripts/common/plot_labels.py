"""Labels of plots."""


def literal_label(name: str) -> str:
    """A name for Matplotlib, to which dollar signs are formulas, and an underscore at the start hides a curve."""
    return f" {name}".replace("$", r"\$") if name.startswith("_") else name.replace("$", r"\$")
