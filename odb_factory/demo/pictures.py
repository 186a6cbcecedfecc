"""Pictures for the built-in MM-Mix: what installed packages ship, questions about them, and drawn text."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING

from odb_factory.demo.mm_mix import PICTURE_SUFFIXES
from odb_factory.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


def draw_text(text: str, font_size: int) -> Image:
    """`text` in black on white, in the font that comes with Pillow; `font_size` in pixels."""
    from PIL import Image, ImageDraw, ImageFont

    font, margin = ImageFont.load_default(font_size), 8
    _, _, right, bottom = ImageDraw.Draw(Image.new("L", (1, 1))).multiline_textbbox((margin, margin), text, font=font)
    image = Image.new("L", (math.ceil(right) + margin, math.ceil(bottom) + margin), "white")
    ImageDraw.Draw(image).multiline_text((margin, margin), text, font=font, fill="black")
    return image


def facts(image: Image) -> list[tuple[str, str]]:
    """Questions about a picture and their answers, computed from its pixels."""
    width, height = image.size
    shape = "square" if width == height else "landscape" if width > height else "portrait"
    left, right = luminance(image, (0, 0, width // 2, height)), luminance(image, (width // 2, 0, width, height))
    upper, lower = luminance(image, (0, 0, width, height // 2)), luminance(image, (0, height // 2, width, height))
    side, end = "left" if left > right else "right", "upper" if upper > lower else "lower"
    tone = "bright" if luminance(image) >= 128 else "dark"
    return [
        ("How large is the picture?", f"{width} by {height} pixels."),
        ("How many pixels has it?", f"{width * height}."),
        ("Is it landscape, portrait or square?", f"It is {shape}, {width / height:.2f} times as wide as tall."),
        ("Which colour covers most of it?", f"Mostly {_main_colour(image)}."),
        ("Is it bright or dark on the whole?", f"It is {tone} on the whole."),
        ("Which half is brighter, left or right?", f"The {side} half is brighter."),
        ("Which half is brighter, upper or lower?", f"The {end} half is brighter."),
    ]


def luminance(image: Image, box: tuple[int, int, int, int] | None = None) -> float:
    """Mean luminance of a picture or of a box (left, upper, right, lower) in it, 0 to 255."""
    from PIL import ImageStat

    return ImageStat.Stat(image.convert("L").crop(box)).mean[0]


_COLOURS = {
    "black": (0, 0, 0), "white": (255, 255, 255), "grey": (128, 128, 128), "red": (200, 30, 30),
    "green": (40, 140, 50), "blue": (40, 80, 190), "yellow": (240, 220, 60), "orange": (240, 140, 40),
    "brown": (110, 70, 40), "beige": (220, 200, 160), "pink": (240, 160, 180), "purple": (120, 50, 150),
}  # fmt: skip


def _main_colour(image: Image) -> str:
    """The name nearest to the most frequent of the picture's four main colours."""
    reduced = image.resize((32, 32)).quantize(4)
    counts = reduced.histogram()
    index = max(range(len(counts)), key=lambda index: (counts[index], index))
    colour = (reduced.getpalette() or [])[3 * index : 3 * index + 3]
    return min(_COLOURS, key=lambda name: math.dist(_COLOURS[name], colour))


def shipped_files(package: str, *folders: str, suffixes: set[str]) -> list[Path]:
    """Files an installed package ships, by name; none where it is missing.

    `importlib.resources` would import the package, which takes gradio seconds.
    """
    spec = importlib.util.find_spec(package)
    roots = spec.submodule_search_locations or [] if spec else []
    found = (path for root in roots for folder in folders for path in Path(root, folder).glob("*"))
    return sorted(path for path in found if path.suffix.lower() in suffixes)


def load_pictures() -> list[tuple[str, Image]]:
    """(file name, picture in RGB) of every distinct shipped picture at least 200 pixels wide and tall."""
    from PIL import Image

    paths = shipped_files("gradio", "media_assets/images", "test_data", suffixes=PICTURE_SUFFIXES)
    paths += shipped_files("matplotlib", "mpl-data/sample_data", suffixes=PICTURE_SUFFIXES)
    pictures = []
    for path in {hashlib.sha256(path.read_bytes()).digest(): path for path in paths}.values():
        with Image.open(path) as image:
            if min(image.size) >= 200:
                ground = Image.new("RGBA", image.size, "white")
                pictures.append((path.name, Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")))
    if not pictures:
        raise DataError("no picture found in gradio or matplotlib; install one of them or name your own sources.")
    return pictures
