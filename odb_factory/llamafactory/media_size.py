"""Vision patches of images and videos from their sizes alone, and the checks that this is exact for a plugin."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from odb_factory.log import get_logger

if TYPE_CHECKING:
    from av.video.stream import VideoStream

logger = get_logger(__name__)

SIZE_IS_ENOUGH = ("Qwen2VLPlugin", "Qwen3VLPlugin", "Qwen2OmniPlugin", "GLM4VPlugin", "ErnieVLPlugin")
CHECK_SIZES = ((37, 211), (640, 480), (1500, 90), (64, 64))


class SizeOnlyImage(Image.Image):
    """An image without pixels: LLaMA-Factory's own resizing rules can be run on its size."""

    def __init__(self, size: tuple[int, int], mode: str = "RGB"):
        super().__init__()
        self._size, self._mode = size, mode

    def resize(self, size: Any, *args: Any, **kwargs: Any) -> SizeOnlyImage:
        return SizeOnlyImage(tuple(size), self.mode)

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> SizeOnlyImage:
        return SizeOnlyImage(self.size, mode or self.mode)


def grid_from_size(plugin: Any, processor: Any, sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """[images, 3] whose rows multiply to the patches of each image (their own shape does not matter here).

    sizes: (width, height) of each image in pixels.
    """
    regular = plugin._regularize_images(
        [SizeOnlyImage(size) for size in sizes],
        image_max_pixels=getattr(processor, "image_max_pixels", 768 * 768),
        image_min_pixels=getattr(processor, "image_min_pixels", 32 * 32),
    )["images"]
    count = processor.image_processor.get_number_of_image_patches
    return torch.tensor([[1, 1, count(image.height, image.width, {})] for image in regular])


def size_is_exact(plugin: Any, processor: Any) -> bool:
    """Whether sizes alone give the real processor's patch counts; tried on a few blank images."""
    if type(plugin).__name__ not in SIZE_IS_ENOUGH:
        return False
    blanks = [Image.new("RGB", size, "white") for size in CHECK_SIZES]
    try:
        real = plugin._get_mm_inputs(blanks, [], [], processor)["image_grid_thw"].prod(-1)
        by_size = grid_from_size(plugin, processor, CHECK_SIZES).prod(-1)
    except (AttributeError, KeyError, TypeError) as error:
        logger.debug("sizes of images do not give their patches (%s: %s)", type(error).__name__, error)
        return False
    if not torch.equal(real, by_size):
        logger.debug("sizes of images give other patches than the real processor")
        return False
    return True


def metadata_is_exact(plugin: Any, processor: Any) -> bool:
    """Whether the grid of a video is known from its metadata, as newer releases have it; tried on a tiny one.

    Where none can be made here (no encoder), LLaMA-Factory, which expands placeholders by these metadata, is believed.
    """
    if not hasattr(plugin, "_get_video_token_metadata"):
        return False
    try:
        with tempfile.TemporaryDirectory() as folder:
            video = write_video(Path(folder, "tiny.avi"))
            known = plugin._get_video_token_metadata([video], processor)["video_grid_thw"]
            real = plugin._get_mm_inputs([], [video], [], processor)["video_grid_thw"]
    except Exception as error:
        logger.debug("metadata of videos were not tried (%s: %s)", type(error).__name__, error)
        return True
    if torch.equal(torch.as_tensor(known).prod(-1), torch.as_tensor(real).prod(-1)):
        return True
    logger.info("videos are observed through the real processor: their metadata give other patch counts")
    return False


def write_video(path: Path) -> str:
    """Eight blank frames, one second."""
    import av

    with av.open(str(path), "w") as container:
        stream: VideoStream = container.add_stream("mjpeg", rate=8)  # type: ignore[assignment]
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (64, 48)))))
        container.mux(stream.encode())
    return str(path)
