"""MM-Mix: questions about pictures, captions, short texts to read and long texts, in LLaMA-Factory's sharegpt format.

80 % of the samples are short (80 to 260 tokens, image tokens included), 20 % are long (several hundred to four
thousand). `build_builtin_mix` generates all pictures and texts; LLaMA-Factory's `mix_strategy` mixes your own data.
A mix is a folder with `mm_mix.json` (training rows), `mm_mix_val.json` and a `dataset_info.json` that lists both.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

TRAIN, VAL = "mm_mix", "mm_mix_val"
MEDIA = "mm_mix_media"
COLOURS = ("red", "green", "blue", "orange", "purple", "brown", "black", "white")
KINDS = ("circle", "square", "triangle")
PLACES = tuple(f"{row} {column}" for row in ("upper", "middle", "lower") for column in ("left", "centre", "right"))
ACTIONS = ("waits beside", "looks at", "follows", "hides behind", "is larger than", "dreams of", "paints")

Row = dict[str, Any]
"""Keys: messages ([{role, content}]) and, for rows with media, images and videos ([path])."""


def build_builtin_mix(folder: Path, *, samples: int = 600, seed: int = 0) -> None:
    """Write `samples` training rows and samples / 15 validation rows; the same seed gives the same bytes.

    build_builtin_mix(Path("mm_mix_data"), samples=512)
    """
    shutil.rmtree(folder / MEDIA, ignore_errors=True)
    (folder / MEDIA).mkdir(parents=True)
    rows: dict[str, list[Row]] = {}
    for name, count in {TRAIN: samples, VAL: max(1, samples // 15)}.items():
        studio = _Studio(random.Random(f"{name} {seed}"), folder, name)
        counts = _apportion(count, [share for share, _ in _TASKS.values()])
        tasks = [task for task, number in zip(_TASKS, counts) for _ in range(number)]
        studio.rng.shuffle(tasks)
        rows[name] = [_TASKS[task][1](studio) for task in tasks]
    _write(folder, rows)


@dataclass
class _Studio:
    """Make the samples of the training or validation part; each task has a method."""

    rng: random.Random
    folder: Path
    name: str
    saved: list[str] = field(default_factory=list)

    def questions(self) -> Row:
        image, shapes = self._scene()
        turns = [("How many shapes are there?", f"There are {len(shapes)}.")]
        turns += [(f"What is in the {place}?", f"A {colour} {kind}.") for place, colour, kind in shapes]
        turns.append(("How large is the picture?", f"{image.width} by {image.height} pixels."))
        self.rng.shuffle(turns)
        turns = turns[: self.rng.randint(3, 5)]
        return _make_row(("<image>" + turns[0][0], turns[0][1]), *turns[1:], images=[self._save(image)])

    def compare(self) -> Row:
        scenes = [self._scene() for _ in range(2)]
        more, wider = (
            "They are alike." if first == second else f"The {'first' if first > second else 'second'} picture."
            for first, second in ([len(shapes) for _, shapes in scenes], [image.width for image, _ in scenes])
        )
        turns = ("<image><image>Which has more shapes?", more), ("Which is wider?", wider)
        return _make_row(*turns, images=[self._save(image) for image, _ in scenes])

    def caption(self) -> Row:
        image, shapes = self._scene()
        text = " ".join(f"A {colour} {kind} is in the {place}." for place, colour, kind in shapes)
        text = f"A picture of {image.width} by {image.height} pixels with {len(shapes)} shapes. {text}"
        return _make_row(("<image>Describe the picture.", text), images=[self._save(image)])

    def read(self) -> Row:
        text = self._story(self.rng.randint(120, 320))
        return _make_row(("<image>Read the text in the picture.", text), images=[self._save(_draw_text(text))])

    def story(self) -> Row:
        """The length is log-uniform: 1,000 to 2,000 characters are as likely as 2,000 to 4,000."""
        characters = round(math.exp(self.rng.uniform(math.log(1000), math.log(8000))))
        return _make_row(("Tell a story about shapes.", self._story(characters)))

    def _story(self, characters: int) -> str:
        text = ""
        while len(text) < characters:
            actor, goal = (f"{self.rng.choice(COLOURS)} {self.rng.choice(KINDS)}" for _ in range(2))
            place, action = self.rng.choice(PLACES), self.rng.choice(ACTIONS)
            text += f"In the {place} a {actor} {action} the {goal}{self.rng.choice(('.', ', and nobody knows why.'))}\n"
        return text.strip()

    def _scene(self) -> tuple[Image, list[tuple[str, str, str]]]:
        """A picture with sides of 160 to 448 pixels, and its shapes: (place, colour, kind)."""
        from PIL import Image, ImageDraw

        width, height = (self.rng.randint(160, 448) for _ in range(2))
        image = Image.new("RGB", (width, height), "lightgrey")
        pen, shapes = ImageDraw.Draw(image), []
        for number in sorted(self.rng.sample(range(len(PLACES)), self.rng.randint(2, 5))):
            colour, kind = self.rng.choice(COLOURS), self.rng.choice(KINDS)
            x, y = (number % 3 + 0.5) * width / 3, (number // 3 + 0.5) * height / 3
            radius = min(width, height) / 6 * self.rng.uniform(0.5, 0.9)
            sides = {"circle": 40, "square": 4, "triangle": 3}[kind]
            pen.regular_polygon((x, y, radius), sides, fill=colour)
            shapes.append((PLACES[number], colour, kind))
        return image, shapes

    def _save(self, image: Image) -> str:
        """Save the image under the next number; return its path relative to the folder of the data set."""
        self.saved.append(f"{MEDIA}/{self.name}_{len(self.saved):05d}.png")
        image.save(self.folder / self.saved[-1])
        return self.saved[-1]


_TASKS: dict[str, tuple[float, Callable[[_Studio], Row]]] = {
    "questions": (0.40, _Studio.questions),
    "compare": (0.06, _Studio.compare),
    "caption": (0.16, _Studio.caption),
    "read": (0.18, _Studio.read),
    "story": (0.20, _Studio.story),
}
"""Task -> (share of the samples, method); only `story` makes long samples."""


def _draw_text(text: str) -> Image:
    """Draw lines of text in black on white, in Pillow's default font."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(12)
    _, _, right, bottom = ImageDraw.Draw(Image.new("L", (1, 1))).multiline_textbbox((8, 8), text, font=font)
    image = Image.new("L", (math.ceil(right) + 8, math.ceil(bottom) + 8), "white")
    ImageDraw.Draw(image).multiline_text((8, 8), text, font=font, fill="black")
    return image


def _apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Split `total` into whole numbers in proportion to `shares`, which add up to 1 (largest remainder method)."""
    counts = [math.floor(total * share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda number: counts[number] - total * shares[number])
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts


def _make_row(*turns: tuple[str, str], **media: list[str]) -> Row:
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    return {"messages": messages, **media}


def _write(folder: Path, rows: dict[str, list[Row]]) -> None:
    """Write the JSON files and add them to `dataset_info.json`; its other entries are kept."""
    index = folder / "dataset_info.json"
    entries = json.loads(index.read_text("utf-8")) if index.exists() else {}
    for name, of_part in rows.items():
        kinds = [kind for kind in ("images", "videos") if any(row.get(kind) for row in of_part)]
        content = [{"messages": row["messages"], **{kind: row.get(kind, []) for kind in kinds}} for row in of_part]
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", "utf-8")
        entries[name] = {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "columns": {column: column for column in ("messages", *kinds)},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
        }
    index.write_text(json.dumps(entries, indent=2) + "\n", "utf-8")
