"""Accuracy of a model on multiple-choice questions by choice likelihood, as MMLU and MMMU are scored.

    python examples/paper/choice_likelihood.py saves/my_model questions.jsonl --device cuda

The file has a JSON object a line: `question` (text; MMMU: with `images`, paths relative to the file), `choices` (a list
of 2 to 26 texts), `answer` (an index from 0, or a letter) and, if there are any, `subject`. The question and its
lettered choices go through the model's chat template, and the letter with the largest log-probability as the next token
is the prediction: nothing is generated. Prints the accuracy with its standard error, over all and by subject.
"""

from __future__ import annotations

import argparse
import json
import math
import string
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

ASKED = "Answer with the letter of the correct choice."


def read(path: Path) -> list[dict[str, Any]]:
    """The questions; ends with one line that names what is wrong with one."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            choices, answer = row["choices"], row["answer"]
            answer = string.ascii_uppercase.index(answer) if isinstance(answer, str) else answer
            if not isinstance(row["question"], str) or not 2 <= len(choices) <= 26 or not 0 <= answer < len(choices):
                raise ValueError("wants a question, 2 to 26 choices, and an answer among them")
        except (ValueError, KeyError, TypeError) as error:
            sys.exit(f"{path}, line {number}: {type(error).__name__}: {error}; see the docstring for the format.")
        images = [path.parent / image for image in row.get("images") or []]
        if missing := [image for image in images if not image.is_file()]:
            sys.exit(
                f"{path}, line {number}: there is no file {missing[0]}; paths are relative to the JSON-lines file."
            )
        rows.append(row | {"answer": answer, "images": images})
    return rows or sys.exit(f"{path}: holds no questions.")


class Scorer:
    """model: a folder or a name. Vision-language models are known by their processor."""

    def __init__(self, model: str, device: str):
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

        sees = hasattr(AutoConfig.from_pretrained(model), "vision_config")
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.processor: Any = AutoProcessor.from_pretrained(model)
        self.tokenizer = self.processor.tokenizer if sees else self.processor
        self.model, self.sees, self.device = kind.from_pretrained(model, dtype=dtype).to(device).eval(), sees, device

    def prompt(self, row: dict[str, Any]) -> str:
        lettered = [f"{letter}. {choice}" for letter, choice in zip(string.ascii_uppercase, row["choices"])]
        text = "\n".join([row["question"], *lettered, ASKED])
        content = [*({"type": "image"} for _ in row["images"]), {"type": "text", "text": text}] if self.sees else text
        messages = [{"role": "user", "content": content}]
        return self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    @torch.no_grad()
    def __call__(self, row: dict[str, Any]) -> list[float]:
        """The log-probability of each choice's letter as the next token."""
        letters = [self.tokenizer.encode(letter, add_special_tokens=False) for letter in string.ascii_uppercase]
        ids = [ids[0] for ids in letters[: len(row["choices"])]]
        if len(set(ids)) < len(ids):
            sys.exit("letters of choices begin with the same token, so this tokenizer cannot be scored by letters.")
        if self.sees:
            from PIL import Image

            images = [Image.open(image).convert("RGB") for image in row["images"]] or None
            inputs = self.processor(text=[self.prompt(row)], images=images, return_tensors="pt")
        elif row["images"]:
            sys.exit(f"{self.model.config.model_type} takes no images; leave questions with images out.")
        else:
            inputs = self.tokenizer([self.prompt(row)], return_tensors="pt", add_special_tokens=False)
        logits = self.model(**inputs.to(self.device)).logits[0, -1].float()
        return logits.log_softmax(-1)[ids].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or name of a chat model")
    parser.add_argument("questions", type=Path, help="JSON lines")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    given = parser.parse_args()
    rows, score = read(given.questions), Scorer(given.model, given.device)
    right: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        scores = score(row)
        hit = max(range(len(scores)), key=scores.__getitem__) == row["answer"]
        for group in dict.fromkeys(("all", row.get("subject", "all"))):
            right[group].append(hit)
    for group, hits in right.items():
        share = sum(hits) / len(hits)
        error = math.sqrt(share * (1 - share) / len(hits))
        print(f"{group}: {share:.2%} of {len(hits)} (standard error {error:.2%})")


if __name__ == "__main__":
    main()
