"""Letters and digits drawn from the fonts that matplotlib ships; some fonts are kept for the test."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from string import ascii_letters, digits

import matplotlib
import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from .images import Images

CHARACTERS = digits + ascii_letters
SIZE = 28
# Whole designs are held out, and not single weights of a design that is seen otherwise.
SEEN = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic", "cmr10", "cmb10", "cmti10"),
)
UNSEEN = ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta", "cmss10", "cmtt10")


@dataclass(frozen=True)
class Distortions:
    """How drawings of one character differ: points of the font, pixels to each side, degrees, noise of a pixel."""

    points: tuple[int, int] = (17, 22)
    shift: float = 1.5
    degrees: float = 8.0
    noise: float = 0.1


def draw_glyphs(fonts: tuple[str, ...], number: int, seed: int) -> Images:
    """`number` images `[N, 1, 28, 28]`: every character of every font about as often as any other.

    Args:
        seed: of the distortions and of what is drawn.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.arange(number) % (len(fonts) * len(CHARACTERS)))
    pixels = np.stack([
        draw_one(fonts[place // len(CHARACTERS)], CHARACTERS[place % len(CHARACTERS)], rng, Distortions())
        for place in order
    ])  # fmt: skip
    labels = torch.from_numpy(order % len(CHARACTERS)).long()
    return Images(torch.from_numpy(pixels).float()[:, None], labels)


def draw_one(font: str, character: str, rng: Generator, distortions: Distortions) -> NDArray[np.float32]:
    """One image `[28, 28]`, from -1 to 1 but for the noise."""
    points = int(rng.integers(*distortions.points, endpoint=True))
    x, y = SIZE / 2 + rng.uniform(-distortions.shift, distortions.shift, size=2)
    image = Image.new("L", (SIZE, SIZE))
    ImageDraw.Draw(image).text((x, y), character, fill=255, font=font_of(font, points), anchor="mm")
    image = image.rotate(rng.uniform(-distortions.degrees, distortions.degrees), Image.Resampling.BILINEAR)
    noise = rng.normal(scale=distortions.noise, size=(SIZE, SIZE))
    return (np.asarray(image, dtype=np.float32) / 127.5 - 1 + noise).astype(np.float32)


@lru_cache
def font_of(name: str, points: int) -> ImageFont.FreeTypeFont:
    """A font of matplotlib's."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"), points)
