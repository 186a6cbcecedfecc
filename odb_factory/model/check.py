"""Check on a tiny random copy of a model, on the host, in a second, that it keeps the samples of a flat row apart.

The samples have 5 to 80 tokens. Windows, chunks, top-k and original contexts of the copy are shorter than most of them,
so the check sees mechanisms that a few short samples of the dataset do not reach. It compares the token losses and the
gradient of one flat row with those of each sample alone in stock. Where they differ, it computes a padded micro-batch
too, which shows whether padding alone changes the model. Router losses of a mixture of experts are figures of a whole
micro-batch and are left out.

All ranks find the same: the check depends on class and config, draws its own random numbers and runs no collective.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from odb_factory.errors import one_line
from odb_factory.model import attention, mixers
from odb_factory.model.flat_row import flat_row
from odb_factory.model.tiny_copy import WORDS, tiny_copy

LENGTHS = (33, 5, 80, 21, 47)
"""Tokens of the samples."""
SAME = 1e-4
"""Allowed relative difference. In the families that were tried, rounding (of parts in float32) is at most 1e-6, and a
leak of one sample into another at least 1e-2."""
COMPUTED_HERE = ("sdpa", "eager", "flex_attention")
"""Attention functions that the copy computes as the model does; flex attention has the masks of sdpa."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Relative difference of two computations.

    loss: the largest of a token's loss, divided by the mean loss. gradient: the norm of the difference of the whole
    gradient, divided by the norm of the gradient.
    """

    loss: float
    gradient: float

    def __str__(self) -> str:
        return f"{self.loss:.0e} / {self.gradient:.0e}"

    @property
    def is_small(self) -> bool:
        return self.loss < SAME and self.gradient < SAME  # false for NaN


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the check. The texts are one line each.

    why_wrong: flat rows would be wrong, and why. why_unknown: there is no verdict, and why. neighbours: flat rows equal
    padded ones, but in both the loss of a sample depends on its neighbours. flat, padded: difference from each sample
    alone, where it was computed.
    """

    why_wrong: str | None = None
    why_unknown: str | None = None
    neighbours: str | None = None
    flat: Difference | None = None
    padded: Difference | None = None


def check(model: Any, *, installs: bool) -> Verdict:
    """model: a `PreTrainedModel` on any device, of which only class and config are looked at. installs: the training
    puts `odb_varlen` in the place of its attention function. Its mixers are taken to be set up (`mixers.install`).

    verdict = check(model, installs=attention.why_unusable(model) is None)
    if verdict.why_wrong is not None:
        raise ConfigError(verdict.why_wrong)
    """
    return check_architecture(type(model), model.config, attention.text_config(model)._attn_implementation, installs)


def check_architecture(model_class: Any, config: Any, kernel: str | None, installs: bool) -> Verdict:
    """The same for a class and a config. kernel: the attention function of the training; None: the class's own."""
    try:
        with torch.device("cpu"), torch.enable_grad(), torch.autocast("cpu", enabled=False), quiet():
            return _verdict(TinyCopy(model_class, config, kernel, installs))
    except Exception as error:
        return Verdict(why_unknown=f"a tiny copy of {model_class.__name__} cannot be run: {one_line(error)}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What transformers says of the copy concerns no training."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


class Unknown(Exception):
    """The copy cannot compute attention as the training does."""


def _verdict(tiny: TinyCopy) -> Verdict:
    alone = tiny.alone()
    if not alone.losses.isfinite().all():
        return Verdict(why_unknown=f"a tiny copy of {tiny.name} computes a loss that is no number")
    try:
        in_one_row = tiny.flat()
    except Exception as error:
        return Verdict(why_wrong=f"{tiny.name} fails on a flat row: {one_line(error)}")
    flat = in_one_row.difference(alone)
    if flat.is_small:
        return Verdict(flat=flat)
    in_rows = tiny.padded()
    padded = in_rows.difference(alone)
    if not padded.is_small and in_one_row.difference(in_rows).is_small:
        neighbours = f"in {tiny.name} the loss of a sample depends on the longest of its micro-batch, in stock too"
        return Verdict(neighbours=neighbours, flat=flat, padded=padded)
    why = (
        f"{tiny.name} computes something else on a flat row: in a tiny copy of it the gradient differs by "
        f"{flat.gradient:.0e} from that of each sample alone"
    )
    if not padded.is_small:
        why += f" (in stock training, padded, by {padded.gradient:.0e})"
    return Verdict(why_wrong=why, flat=flat, padded=padded)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Token losses of all samples, one after the other, and the gradient of their weighted sum, by parameter."""

    losses: Tensor
    gradient: list[Tensor | None]

    def difference(self, stock: Outcome) -> Difference:
        norm = sum(float((theirs**2).sum()) for theirs in stock.gradient if theirs is not None)
        off = 0.0
        for mine, theirs in zip(self.gradient, stock.gradient):
            found = [one for one in (mine, theirs) if one is not None]
            if found:
                off += float(((found[0] - found[1] if len(found) > 1 else found[0]) ** 2).sum())
        of_loss = (self.losses - stock.losses).abs().max() / stock.losses.abs().mean()
        return Difference(float(of_loss), math.sqrt(off / norm) if norm else math.nan)


class TinyCopy:
    """A tiny copy and its samples. Arguments: see `check_architecture`. Raises `Unknown`, or an error of the class."""

    def __init__(self, model_class: Any, config: Any, kernel: str | None, installs: bool):
        is_flash = kernel is not None and "flash" in kernel
        if kernel is not None and kernel not in COMPUTED_HERE and not is_flash:
            raise Unknown(f"nothing is known of the attention function {kernel}")
        self.name = model_class.__name__
        self.model = tiny_copy(model_class, config, kernel if kernel in (None, "eager") else "sdpa")
        if is_flash and (why := attention.why_unusable(self.model)) is not None:
            raise Unknown(f"{kernel} does not run on the host, and {why}")
        self._installs = installs or is_flash
        generator = torch.Generator().manual_seed(0)
        self._ids = [torch.randint(*WORDS, (length,), generator=generator) for length in LENGTHS]
        parameters = inspect.signature(self.model.forward).parameters
        self._marks = [name for name in ("token_type_ids", "mm_token_type_ids") if name in parameters]

    def alone(self) -> Outcome:
        """Each sample in a batch of its own, as stock computes it."""
        outcomes = [self._run(self._rows([sample])) for sample in range(len(LENGTHS))]
        gradients = zip(*(outcome.gradient for outcome in outcomes))
        added = [sum(found) if (found := [one for one in of if one is not None]) else None for of in gradients]
        return Outcome(torch.cat([outcome.losses for outcome in outcomes]), added)

    def padded(self) -> Outcome:
        """All samples in one micro-batch of stock."""
        return self._run(self._rows(range(len(LENGTHS))))

    def flat(self, *, lengths_are_known: bool = True) -> Outcome:
        """All samples in one flat row, as odb computes it; or as one long sample, which must be far off."""
        total = sum(LENGTHS)
        segments = LENGTHS if lengths_are_known else (total,)
        ends = itertools.accumulate(LENGTHS)
        batch = {
            "input_ids": torch.cat(self._ids)[None],
            "position_ids": torch.cat([torch.arange(length) for length in segments])[None],
        }
        batch |= {name: torch.cat([self._mark(name, length) for length in LENGTHS])[None] for name in self._marks}
        return self._run(batch, [(0, end - length, end) for length, end in zip(LENGTHS, ends)], segments)

    def _rows(self, samples: Sequence[int]) -> dict[str, Tensor]:
        longest = max(LENGTHS[sample] for sample in samples)

        def padded(values: Tensor) -> Tensor:
            return functional.pad(values, (0, longest - len(values)))

        batch = {
            "input_ids": torch.stack([padded(self._ids[sample]) for sample in samples]),
            "attention_mask": torch.stack([padded(torch.ones(LENGTHS[sample]).long()) for sample in samples]),
        }
        for name in self._marks:
            batch[name] = torch.stack([padded(self._mark(name, LENGTHS[sample])) for sample in samples])
        return batch

    def _mark(self, name: str, length: int) -> Tensor:
        """int64[length]: the second half of a sample is of another type of tokens; none is of an image."""
        return (torch.arange(length) >= length // 2).long() * (name == "token_type_ids")

    def _run(
        self, batch: dict[str, Tensor], spans: Sequence[tuple[int, int, int]] = (), segments: Sequence[int] = ()
    ) -> Outcome:
        """spans: (row, first token, end) of each sample; of padded rows by their mask. Every run has a copy of its own:
        rotary positions remember the longest row."""
        model = copy.deepcopy(self.model)
        if segments:
            mixers.install(model)
        if segments and self._installs:
            attention.install(model)
        spans = spans or [(row, 0, int(length)) for row, length in enumerate(batch["attention_mask"].sum(1))]
        with flat_row(segments, is_trial=True):
            logits = model(**batch).logits
            losses = torch.cat(
                [
                    functional.cross_entropy(
                        logits[row, start : end - 1], batch["input_ids"][row, start + 1 : end], reduction="none"
                    )
                    for row, start, end in spans
                ]
            )
            weights = torch.cat([torch.arange(1, end - start) % 3 + 1 for _, start, end in spans])
            parameters = [one for one in model.parameters() if one.requires_grad]
            gradient = torch.autograd.grad((losses * weights).sum(), parameters, allow_unused=True)
        return Outcome(losses.detach(), list(gradient))
