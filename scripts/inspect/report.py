"""Writes the page of an inspection, and its pictures as files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..common.composition_observation import STAGES, LayerObservation
from ..common.figures import save
from ..common.html_page import heading, page, paragraph, picture, table
from .figures import draw_flow, draw_maps, draw_similarity, draw_terms
from .measures import head_flow

PAGE = "page.html"
RESOLUTION = 110  # dots per inch of pictures
# The files of all pictures that a page may have; `stage_figures` makes those of one stage.
PICTURES = frozenset(f"{stage}-{name}.png" for stage in STAGES for name in ("terms", "similarity", "flow", "maps"))
TITLES = {"pre": "Before the softmax: scores", "post": "After the softmax: probabilities"}
EXPLANATIONS = {
    "pre": "Each pair of a query and a key mixes the scores of all heads with a matrix of its own, I plus terms.",
    "post": "The same for probabilities. They can be negative afterwards, and need not sum to one.",
}
RANK = (
    "The effective rank of the matrices is the exponential of the entropy of their singular values: the number of "
    "heads for I, and 1 for a matrix of rank one."
)


def write_report(record: Mapping[str, Any], layer: LayerObservation, shown: int, folder: Path) -> None:
    """Writes `page.html`, which needs no other file, and each picture as a PNG.

    Args:
        record: what `look` measured.
        layer: the layer whose maps are drawn, which is number `shown`.
    """
    parts = [paragraph(summary(record)), heading("Without a term"), ablation_table(record)]
    for stage in layer.stages:
        parts += [heading(TITLES[stage]), paragraph(EXPLANATIONS[stage]), layer_table(record, stage), paragraph(RANK)]
        for name, (figure, caption) in stage_figures(record, layer, shown, stage).items():
            file = folder / f"{stage}-{name}.png"
            save(figure, file, RESOLUTION)
            parts.append(picture(file.read_bytes(), caption))
    (folder / PAGE).write_text(page(f"Composed heads of {record['model']}", parts), encoding="utf-8")


def stage_figures(
    record: Mapping[str, Any], layer: LayerObservation, shown: int, stage: str
) -> dict[str, tuple[Figure, str]]:
    """The pictures of a stage by name, each with its caption."""
    return {
        "terms": (
            draw_terms(record["layers"], stage),
            "The Frobenius norm of each term's matrix, in units of the identity's: root mean square over tokens.",
        ),
        "similarity": (
            draw_similarity(record["layers"], stage),
            "Mean cosine of the maps of two heads, over visible pairs: 1 if all heads do the same.",
        ),
        "flow": (
            draw_flow(head_flow(layer, stage), f"layer {shown}: from head to head"),
            "Mean size of what a head's map adds to another head's. After the softmax these are virtual heads: the "
            "probabilities of one head weigh the values of another.",
        ),
        "maps": (
            draw_maps(layer, stage),
            f"Layer {shown}: maps of each head before (above) and after composing (below); red is positive.",
        ),
    }


def summary(record: Mapping[str, Any]) -> str:
    """The model, the text and the loss in one sentence."""
    return (
        f"{record['model_type']}, {len(record['layers'])} layers; {record['tokens']} tokens of {record['text']}; "
        f"loss {record['loss']:.4f} nats per token."
    )


def ablation_table(record: Mapping[str, Any]) -> str:
    """The loss without each stage and term, in all layers at once."""
    rows = [
        [f"{row['stage']}, {row['term'].replace('_', ' ')}", f"{row['loss']:.4f}", f"{row['difference']:+.4f}"]
        for row in record["ablations"]
    ]
    return table(["left out", "loss", "difference"], [["nothing", f"{record['loss']:.4f}", ""], *rows])


def layer_table(record: Mapping[str, Any], stage: str) -> str:
    """Distance from the identity, rank and similarity by layer."""
    rows = []
    for number, layer in enumerate(record["layers"]):
        measured = layer[stage]
        before, after = measured["similarity"]
        numbers = (measured["distance"], measured["effective_rank"], before, after)
        rows.append([str(number), *(f"{value:.3f}" for value in numbers)])
    header = ["layer", "distance from I (I = 1)", "effective rank", "similarity before", "after"]
    return table(header, rows)
