"""What odb_factory relies on in LLaMA-Factory, datasets and Pillow without their promise, tried before training.

A name that is gone is found when it is hooked. A name that means something else would give wrong data in silence, so
each is tried here, in runs with an `odb:` block only: signatures before the YAML is read, meaning on a row of the data
and on tiny images. All together take less than a second. Each function raises `ConfigError` if what it tries differs.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from odb_factory.errors import ConfigError

ROWS_TRIED = 3
MEDIA = ("_images", "_videos", "_audios", "images", "videos", "audios")
PARAMETERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("data.loader", "_get_preprocessed_dataset"): (
        "dataset", "data_args", "training_args", "stage", "template", "tokenizer", "processor", "is_eval",
    ),
    ("data.loader", "_get_dataset_processor"): ("data_args", "stage", "template", "tokenizer", "processor"),
    ("data.loader", "align_dataset"): ("dataset", "dataset_attr", "data_args", "training_args"),
    ("data.mm_plugin", "BasePlugin.process_messages"): ("self", "messages", "images", "videos", "audios", "processor"),
    ("data.mm_plugin", "BasePlugin.process_token_ids"): (
        "self", "input_ids", "labels", "images", "videos", "audios", "tokenizer", "processor",
    ),
    ("data.mm_plugin", "BasePlugin._get_mm_inputs"): ("self", "images", "videos", "audios", "processor"),
    ("data.mm_plugin", "BasePlugin._regularize_images"): ("self", "images"),
    ("data.mm_plugin", "Qwen2VLPlugin._get_video_token_metadata"): ("self", "videos", "processor"),
}  # fmt: skip
"""The first parameters that functions of LLaMA-Factory have, in their order; a release may lack the last function."""
ARGUMENTS = (
    ("model_args", "model_name_or_path"),
    ("data_args", "cutoff_len"),
    ("training_args", "output_dir"),
    ("finetuning_args", "stage"),
)
"""What `get_train_args` returns first, and a field that tells each from the others."""


def check_signatures() -> None:
    for (module, path), expected in PARAMETERS.items():
        function: Any = importlib.import_module(f"llamafactory.{module}")
        for part in path.split("."):
            function = getattr(function, part, None)
        if function is None:  # found where it is hooked or used
            continue
        found = tuple(inspect.signature(function).parameters)
        if found[: len(expected)] != expected:
            _differs(f"llamafactory.{module}.{path} takes {', '.join(found)} instead of {', '.join(expected)}")


def check_arguments(parsed: Sequence[Any]) -> None:
    """That `get_train_args` returns what it did, in that order."""
    for (name, field), found in zip(ARGUMENTS, parsed):
        if not hasattr(found, field):
            _differs(f"llamafactory.hparams.parser.get_train_args gives {type(found).__name__} where {name} was")


def check_conversion(convert: Callable[[int], dict[str, Any]], rows: Any, align: Callable[[Any], Any]) -> None:
    """That rows converted one at a time are those of LLaMA-Factory's pass over `rows`, which `align` makes."""
    _compare(convert, lambda index: align(_one_row(rows, index))[0], len(rows), "the conversion of its format")


def check_preprocessing(
    preprocess: Callable[[int], dict[str, Any]],
    rows_of: Callable[[int], list[dict[str, Any]]],
    count: int,
    stock: Callable,
) -> None:
    """That rows preprocessed one at a time are those of LLaMA-Factory's pass, which `stock` makes of a dataset.

    rows_of: a converted row, behind those that must be in one batch with it.
    """
    import datasets

    def by_pass(index: int) -> dict[str, Any]:
        rows = rows_of(index)
        if any(row.get(name) for name in ("_videos", "_audios") for row in rows):
            raise ValueError("takes long")
        # As they are stored: an encoded cell is what LLaMA-Factory takes for an image, too.
        stored = [row | {"_images": [_plain(image) for image in row.get("_images") or []]} for row in rows]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the row, which we have done
            return stock(datasets.Dataset.from_list(stored))[-1]

    _compare(preprocess, by_pass, count, "its preprocessing")


def check_images() -> None:
    """That `datasets` decodes and encodes a cell of images, and Pillow keeps sizes, as `media` takes for granted."""
    import datasets
    from PIL import Image

    from odb_factory.llamafactory import media_sizes

    image = Image.frombytes("RGB", (3, 2), bytes(range(18)))
    stored = io.BytesIO()
    image.save(stored, "PNG")
    feature = datasets.Image()
    opened = _tried("datasets.Image.decode_example", feature.decode_example, {"bytes": stored.getvalue(), "path": None})
    again = _tried("datasets.Image.encode_example", feature.encode_example, opened)
    if not isinstance(again, dict) or {"bytes", "path"} - set(again):
        _differs(f"datasets.Image.encode_example gives {type(again).__name__} instead of bytes and path")
    twice = _tried("datasets.Image.decode_example", feature.decode_example, again)
    if any(one.convert("RGB").tobytes() != image.tobytes() for one in (opened, twice)) or opened.format != "PNG":
        _differs("datasets.Image gives other pixels or another format than it was given")
    blank = _tried("PIL.Image", media_sizes.SizeOnlyImage, (3, 2))
    if (blank.size, blank.width, blank.height, blank.mode) != ((3, 2), 3, 2, "RGB"):
        _differs("PIL.Image.Image keeps its size or mode in another place")


def check_progress(callback: Any) -> None:
    """That LLaMA-Factory's log callback reads the number of steps where we correct it."""
    if not isinstance(getattr(callback, "max_steps", None), int):
        _differs("llamafactory.train.callbacks.LogCallback has no max_steps")


def check_launcher(launcher: Any) -> None:
    """That a launcher gives torchrun the file that its `__file__` names, which is how it can be another."""
    original = inspect.unwrap(launcher.launch)
    if "__file__" not in original.__code__.co_names:
        _differs("llamafactory.launcher.launch starts processes by another file than its own")


def _compare(ours: Callable[[int], Any], stock: Callable[[int], Any], count: int, what: str) -> None:
    """On the first row that both can make; one that cannot be made is for `on_error`, or for stock to report."""
    for index in range(min(count, ROWS_TRIED)):
        try:
            own = ours(index)
            with _no_progress_bars():
                other = stock(index)
        except Exception:
            continue
        for name in dict.fromkeys((*own, *other)):
            mine, its = own.get(name), other.get(name)
            if name in MEDIA:
                mine, its = len(mine or []), len(its or [])
            if mine != its:
                _differs(f"{what} gives another {name} by row than by its pass over all rows (row {index})")
        return


def _one_row(rows: Any, index: int) -> Any:
    """A dataset of this row alone, in memory, so that no file is written for it."""
    import datasets

    table = rows.with_format("arrow")[index : index + 1]
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=rows.features))


def without_processes(data_args: Any) -> Any:
    """The data arguments for a pass over one row."""
    changed = copy.copy(data_args)
    changed.preprocessing_num_workers, changed.overwrite_cache = None, True
    return changed


def _plain(image: Any) -> Any:
    from odb_factory.llamafactory.media import EncodedImage

    return {"bytes": image.bytes, "path": image.path} if isinstance(image, EncodedImage) else image


def _tried(name: str, function: Callable, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        _differs(f"{name} raises {type(error).__name__}: {error}")


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    if shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _differs(what: str) -> None:
    raise ConfigError(
        f"odb: {' '.join(what.split())}, so odb_factory would not train on the data that this release means; install a "
        "supported release (`odb-factory doctor` names them)."
    )
