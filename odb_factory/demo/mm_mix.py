"""MM-Mix: OCR, visual questions and captions, in LLaMA-Factory's sharegpt format.

Most samples are short (80 to 250 tokens, image tokens included), one in five is long (several
hundred to several thousand): the shape that makes fixed-size batches wasteful. `build_builtin_mix` makes one
from files every installation has; examples/mm_mix/build.py makes one from your own data.

A mix is a folder with `mm_mix.json` (training rows), `mm_mix_val.json` and their entries `mm_mix` and
`mm_mix_val` in `dataset_info.json`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import random
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_factory.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


# ----------------------------------------------------------------------------------------------------------------------
# The built-in MM-Mix, made of what every installation of LLaMA-Factory already holds.
# CPython's help topics, and the pictures and videos that gradio and matplotlib ship. The audio files among them are
# left out: Qwen3-VL does not hear. Media go into `mm_mix_media/` beside the rows.

_MEDIA = "mm_mix_media"


def build_builtin_mix(folder: Path, *, samples: int = 600, seed: int = 0) -> MixSummary:
    """Write `samples` training rows and a fifteenth as many validation rows, made of installed files.

    The two parts share no help topic and no picture. The same seed and files give the same bytes.
    Raises `DataError` when neither gradio nor matplotlib ships a picture.
    """
    from pydoc_data.topics import topics

    folder = Path(folder)
    pictures = _hold_out(load_pictures())
    # By length, so that both parts get short and long topics.
    by_length = _hold_out(sorted(topics.items(), key=lambda item: (len(item[1]), item[0])))
    videos = shipped_files("gradio", "media_assets/videos", suffixes={".mp4"})
    shares = {task: share for task, (share, _) in _TASKS.items() if videos or task != "video"}
    shutil.rmtree(folder / _MEDIA, ignore_errors=True)
    (folder / _MEDIA).mkdir(parents=True)

    rows: dict[str, list[Row]] = {}
    parts: Counter[str] = Counter()
    for i, (name, count) in enumerate({TRAIN: samples, VAL: num_validation(samples)}.items()):
        rng = random.Random(f"{name} {seed}")
        studio = _Studio(name, folder, rng, dict(by_length[i]), dict(pictures[i]), videos)
        tasks = [task for task, n in zip(shares, apportion(count, shares.values()), strict=True) for _ in range(n)]
        rng.shuffle(tasks)
        rows[name] = [_TASKS[task][1](studio) for task in tasks]
        parts.update(tasks)
    return write_mix(folder, rows, dict(parts))


@dataclass
class _Studio:
    """Makes the samples of one part of the built-in mix, one method for each task."""

    name: str
    folder: Path
    rng: random.Random
    topics: dict[str, str]  # text by topic
    pictures: dict[str, Image]  # by file name
    videos: list[Path]
    num_saved: int = 0

    def vqa(self) -> Row:
        image, _ = self._view()
        turns = self.rng.sample(facts(image), self.rng.randint(2, 4))
        turns[0] = (f"<image>{turns[0][0]}", turns[0][1])
        return make_row(*turns, images=[self._save(image, "jpg")])

    def compare(self) -> Row:
        images = [self._view()[0] for _ in range(2)]
        turns = []
        sizes: dict[str, list[float]] = {
            "wider": [image.width for image in images],
            "taller": [image.height for image in images],
            "brighter": [luminance(image) for image in images],
        }
        for word, (first, second) in sizes.items():
            answer = "They are alike." if first == second else "The first." if first > second else "The second."
            turns.append((f"Which is {word}?", answer))
        self.rng.shuffle(turns)
        turns[0] = (f"Two pictures: <image><image>{turns[0][0]}", turns[0][1])
        return make_row(*turns[: self.rng.randint(1, 3)], images=[self._save(image, "jpg") for image in images])

    def caption(self) -> Row:
        image, name = self._view()
        answers = [answer for _, answer in facts(image)[2:]]
        text = f"A part of the picture {name}, {image.width} by {image.height} pixels. "
        text += " ".join(self.rng.sample(answers, self.rng.randint(2, 4)))
        return make_row(("<image>Describe the picture.", text), images=[self._save(image, "jpg")])

    def ocr(self) -> Row:
        return self._read_aloud(self.rng.randint(120, 400))

    def page(self) -> Row:
        return self._read_aloud(self._long(1500, 4500))

    def note(self) -> Row:
        return self._explain(self.rng.randint(240, 700))

    def topic(self) -> Row:
        chars = self._long(1600, 14000)
        if self.rng.random() < 0.5:
            return self._explain(chars)
        name, text = self._passage(chars)
        lines = text.splitlines()
        given, rest = "\n".join(lines[:5]), "\n".join(lines[5:])
        return make_row((f'Continue this passage from the Python topic "{name}":\n\n{given}', rest))

    def video(self) -> Row:
        import av

        path = self.rng.choice(self.videos)
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            assert stream.duration and stream.time_base and stream.average_rate  # the clips of gradio have all three
            seconds, rate = float(stream.duration * stream.time_base), float(stream.average_rate)
            size = f"{stream.width} by {stream.height} pixels"
        shutil.copyfile(path, self.folder / _MEDIA / path.name)
        question = self.rng.choice(["What kind of clip is this?", "How long and how large is this video?"])
        answer = f"{seconds:.1f} seconds of video, {size}, {rate:.0f} pictures a second."
        return make_row((f"<video>{question}", answer), videos=[f"{_MEDIA}/{path.name}"])

    def _explain(self, chars: int) -> Row:
        """A question on a topic; the answer is its opening, about `chars` characters."""
        name = self._topic(chars)
        text = self.topics[name]
        return make_row((f'What does the Python reference say on "{name}"?', text[: _line_end(text, chars)].strip()))

    def _read_aloud(self, chars: int) -> Row:
        """A picture of about `chars` characters of text; the answer is that text."""
        text = "\n".join(line for line in self._passage(chars)[1].splitlines() if _drawable(line)).strip()
        image = draw_text(text, self.rng.randint(11, 16))
        return make_row(("<image>Read the text in the picture.", text), images=[self._save(image, "png")])

    def _topic(self, chars: int) -> str:
        """The name of a topic of at least `chars` characters, or of the longest."""
        longest = max(self.topics, key=lambda name: len(self.topics[name]))
        return self.rng.choice([name for name, text in self.topics.items() if len(text) >= chars] or [longest])

    def _passage(self, chars: int) -> tuple[str, str]:
        """A topic's name and about `chars` characters of its text: whole lines from anywhere in it."""
        name = self._topic(chars)
        text = self.topics[name]
        start = text.rfind("\n", 0, self.rng.randint(0, max(0, len(text) - chars))) + 1
        return name, textwrap.dedent(text[start : _line_end(text, start + chars)]).strip()

    def _long(self, least: int, most: int) -> int:
        """A number of characters, log-uniform: as many samples between 2,000 and 4,000 as between 4,000 and 8,000."""
        return round(math.exp(self.rng.uniform(math.log(least), math.log(most))))

    def _view(self) -> tuple[Image, str]:
        """A random crop of a random picture, at most 160 to 448 pixels a side; and the picture's name."""
        name = self.rng.choice(list(self.pictures))
        image = self.pictures[name]
        width, height = (self.rng.randint(side // 2, side) for side in image.size)
        left, top = self.rng.randint(0, image.width - width), self.rng.randint(0, image.height - height)
        view = image.crop((left, top, left + width, top + height))
        side = self.rng.randint(160, 448)
        view.thumbnail((side, side))
        return view, name

    def _save(self, image: Image, suffix: str) -> str:
        """Save under the next number; return the path relative to the data set's folder."""
        path = f"{_MEDIA}/{self.name}_{self.num_saved:05d}.{suffix}"
        self.num_saved += 1
        image.save(self.folder / path)
        return path


# Each task and its share of the samples; the last three are long.
_TASKS: dict[str, tuple[float, Callable[[_Studio], Row]]] = {
    "vqa": (0.34, _Studio.vqa),
    "compare": (0.06, _Studio.compare),
    "caption": (0.16, _Studio.caption),
    "ocr": (0.20, _Studio.ocr),
    "note": (0.04, _Studio.note),
    "page": (0.08, _Studio.page),
    "topic": (0.11, _Studio.topic),
    "video": (0.01, _Studio.video),
}


def _line_end(text: str, position: int) -> int:
    """Where the line at `position` ends."""
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _drawable(line: str) -> bool:
    """Whether Pillow's font has every character; the help topics use a few that it lacks, such as dashes."""
    return all(character.isascii() or character in "‘’“”…" for character in line)


def _hold_out(items: list) -> tuple[list, list]:
    """Every sixth item for validation, the rest for training; a single item serves both."""
    first = min(5, len(items) - 1)
    return [item for i, item in enumerate(items) if (i - first) % 6] or items, items[first::6]


# ----------------------------------------------------------------------------------------------------------------------
# Pictures for the built-in MM-Mix: what installed packages ship, questions about them, and drawn text.


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


TRAIN, VAL = "mm_mix", "mm_mix_val"
PICTURE_SUFFIXES = {".jpg", ".jpeg", ".png", ".gif", ".webp"}

Row = dict[str, Any]  # messages: [{role, content}], and where there are any: images, videos: [path]


@dataclass(frozen=True, kw_only=True)
class MixSummary:
    """What was built: rows for training and validation, and rows of both by task or by source."""

    folder: Path
    train: int
    val: int
    parts: dict[str, int]


def num_validation(num_train: int) -> int:
    return max(1, num_train // 15)


def apportion(total: int, weights: Iterable[float]) -> list[int]:
    """Whole numbers in proportion to the weights that add up to `total` (largest remainders)."""
    weights = list(weights)
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def make_row(*turns: tuple[str, str], **media: list[str]) -> Row:
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    return {"messages": messages, **media}


def write_mix(folder: Path, rows: dict[str, list[Row]], parts: dict[str, int]) -> MixSummary:
    """Write the JSON files and enter them in `dataset_info.json`, whose other entries stay."""
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "dataset_info.json"
    entries = json.loads(index.read_text("utf-8")) if index.exists() else {}
    for name, own in rows.items():
        kinds = [kind for kind in ("images", "videos") if any(row.get(kind) for row in own)]
        own = [{"messages": row["messages"], **{kind: row.get(kind, []) for kind in kinds}} for row in own]
        (folder / f"{name}.json").write_text(json.dumps(own, ensure_ascii=False, indent=1) + "\n", "utf-8")
        entries[name] = {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "columns": {column: column for column in ("messages", *kinds)},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
        }
    index.write_text(json.dumps(entries, indent=2) + "\n", "utf-8")
    return MixSummary(folder=folder, train=len(rows[TRAIN]), val=len(rows[VAL]), parts=parts)
