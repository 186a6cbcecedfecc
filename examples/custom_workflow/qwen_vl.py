"""Fine-tune a Qwen-VL with samples that `qwen-vl-utils` and the model's own processor prepare, batches formed online.

python examples/custom_workflow/qwen_vl.py
"""

from __future__ import annotations

import argparse
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import av
import torch
from PIL import Image
from qwen_vl_utils import process_vision_info
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

from odb_factory import enable_odb
from odb_factory.cli.demo import build_tiny_qwen3_vl
from odb_factory.cli.mm_mix import build_builtin_mix

FRAMES_A_SECOND, MOST_FRAMES = 2.0, 16
PIXELS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
"""What a processor returns of media: of all pictures or clips of a row, one after the other."""


class VisualChats(Dataset):
    """Rows of {"messages": [{role, content}], "images": [path], "videos": [path]}.

    `<image>` and `<video>` in a content are where a picture or a clip goes.
    """

    def __init__(self, path: Path, processor: Any, max_pixels: int):
        self.rows = json.loads(path.read_text("utf-8"))
        self.folder, self.processor, self.max_pixels = path.parent, processor, max_pixels
        # What stands around an answer in Qwen's chat template.
        self.header = processor.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
        self.end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        messages = self.messages(self.rows[index])
        vision = self.processor.image_processor
        images, videos, video_options = process_vision_info(
            messages, return_video_kwargs=True, return_video_metadata=True, image_patch_size=vision.patch_size
        )
        if videos is not None:  # what they show, and how they were cut out of their file
            video_options["videos"], video_options["video_metadata"] = map(list, zip(*videos))
        text = self.processor.apply_chat_template(messages, tokenize=False)
        if images is None and videos is None:
            # Every batch must run the vision tower: a rank that skips it would leave the others waiting for its weights
            # (ZeRO-3, FSDP) or their gradients (DDP, unless ddp_find_unused_parameters is set). So a row of text alone
            # gets the smallest picture there is, after its end: no token before it sees it, and it has no label.
            text += "<|vision_start|><|image_pad|><|vision_end|>"
            images = [Image.new("RGB", 2 * (vision.patch_size * vision.merge_size,))]
        inputs = self.processor(text=[text], images=images, do_resize=False, return_tensors="pt", **video_options)
        item = {key: value if key in PIXELS else value[0] for key, value in inputs.items()}
        return item | {"labels": self.labels(item["input_ids"])}

    def messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """A row as the chat template and `process_vision_info` want it."""
        names = {"image": iter(row.get("images", [])), "video": iter(row.get("videos", []))}
        messages = []
        for turn in row["messages"]:
            parts = []
            for part in re.split("<(image|video)>", turn["content"]):
                if part == "image":
                    path = str(self.folder / next(names[part]))
                    parts.append({"type": part, part: path, "max_pixels": self.max_pixels})
                elif part == "video":  # a path will do where `process_vision_info` finds a reader (torchcodec, decord)
                    frames, rate = frames_of(self.folder / next(names[part]))
                    sizes = {"min_pixels": self.max_pixels // 8, "max_pixels": self.max_pixels // 4}
                    parts.append({"type": part, part: frames, "sample_fps": rate, **sizes})
                elif part:
                    parts.append({"type": "text", "text": part})
            messages.append({"role": turn["role"], "content": parts})
        return messages

    def labels(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The answers, each with the `<|im_end|>` after it; -100 for everything else."""
        ids, labels = input_ids.tolist(), torch.full_like(input_ids, -100)
        for start in range(len(self.header), len(ids)):
            if ids[start - len(self.header) : start] == self.header:
                stop = ids.index(self.end, start) + 1
                labels[start:stop] = input_ids[start:stop]
        return labels


def frames_of(path: Path) -> tuple[list[Image.Image], float]:
    """Pictures of a clip, from its start, and how many of them a second."""
    with av.open(str(path)) as clip:
        every = max(round(float(clip.streams.video[0].average_rate) / FRAMES_A_SECOND), 1)
        rate = float(clip.streams.video[0].average_rate) / every
        chosen = islice(clip.decode(video=0), 0, every * MOST_FRAMES, every)
        return [frame.to_image() for frame in chosen], rate


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Media of all rows one after the other; everything that has an entry for each token padded on the right."""
    media = {key: [row[key] for row in rows if key in row] for key in PIXELS}
    batch = {key: torch.cat(tensors) for key, tensors in media.items() if tensors}
    # input_ids, attention_mask, labels and, since transformers 5, mm_token_type_ids; ids of 0 are masked out.
    for key in rows[0].keys() - set(PIXELS):
        filler = -100 if key == "labels" else 0
        batch[key] = pad_sequence([row[key] for row in rows], batch_first=True, padding_value=filler)
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name or folder of a Qwen2.5-VL or Qwen3-VL (none: a tiny random one)")
    parser.add_argument("--data", type=Path, help="JSON file, picture paths relative to it (none: the built-in MM-Mix)")
    parser.add_argument("--output", type=Path, default=Path("saves/qwen_vl"), help="(%(default)s)")
    parser.add_argument("--token_budget", type=int, default=4096, help="tokens of a micro-batch (%(default)s)")
    parser.add_argument("--max_patches", type=int, default=4096, help="patches of a micro-batch (%(default)s)")
    parser.add_argument("--max_pixels", type=int, default=320 * 320, help="of a picture (%(default)s)")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="a real model wants about 1e-5 (%(default)s)")
    args = parser.parse_args()

    training = TrainingArguments(
        output_dir=str(args.output),
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        num_train_epochs=1,
        learning_rate=args.learning_rate,
        ddp_find_unused_parameters=False,  # every batch has a picture or a clip
        remove_unused_columns=False,  # the items hold what the model takes, nothing else
        save_strategy="no",
        logging_steps=2,
        dataloader_num_workers=2,
        report_to="none",
    )
    with training.main_process_first():  # under torchrun one rank makes the files, the others read them
        path = args.model or build_tiny_qwen3_vl(args.output / "tiny_qwen3_vl")
        data = args.data or args.output / "mm_mix_data" / "mm_mix.json"
        if not data.exists():
            build_builtin_mix(data.parent, samples=160)
    trainer = Trainer(
        model=AutoModelForImageTextToText.from_pretrained(path),
        args=training,
        train_dataset=VisualChats(data, AutoProcessor.from_pretrained(path), args.max_pixels),
        data_collator=collate,
    )
    # The samples that wait hold their pixels here, a few MB each: buffer_size of them on each rank.
    enable_odb(trainer, token_budget=args.token_budget, max_patches=args.max_patches, buffer_size=128, audit=True)
    trainer.train()
    trainer.save_model(str(args.output / "model"))


if __name__ == "__main__":
    main()
