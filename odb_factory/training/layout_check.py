"""The check of a flat layout on the real model, before it is trained: a few samples flat, padded and alone (I10).

The losses of their tokens must agree. How closely says the model itself: two padded layouts of the same samples differ
by rounding. Without gradients and in eval mode; every rank runs the model equally often, on the same rows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from odb_factory.accounting.losses import in_float32
from odb_factory.data.collate import GroupDataset, NotCollated
from odb_factory.data.layout import BOUNDARY_KEYS, UNPADDED, FlatLayout, model_keys
from odb_factory.data.loader import ODBLoader
from odb_factory.data.measure import IGNORE_INDEX
from odb_factory.data.samples import Sample
from odb_factory.errors import DataError, one_line
from odb_factory.log import get_logger
from odb_factory.model.flat_row import flat_row
from odb_factory.model.head import WithoutLogits
from odb_factory.planning import VIDEO
from odb_factory.training.checks import unwrapped

# ----------------------------------------------------------------------------------------------------------------------
# The same few samples laid out in several ways, for the check of a flat layout (I10).

NUM_SAMPLES = 3
TEXT_KEYS = {"input_ids", "labels", "position_ids", *BOUNDARY_KEYS}
"""What a flat batch of text has: it can be cut apart again."""
FURTHER = 8
"""Tokens by which the second padded layout of a batch that was cut apart is longer."""


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A batch without labels, and where in it each sample is: number of the sample -> (row, first token, end)."""

    batch: dict[str, Any]
    spans: dict[int, tuple[int, int, int]]
    segments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """Samples by their number: each alone, padded in two ways, flat. As many batches whatever the samples, so that
    ranks run the model equally often. ids: rows of the dataset. has_logits: else a flat micro-batch has none."""

    alone: tuple[LaidOut, ...]
    padded: tuple[LaidOut, ...]
    flat: LaidOut
    ids: tuple[int, ...] = ()
    has_logits: bool = True


def choose(samples: Sequence[Sample]) -> list[Sample]:
    """`NUM_SAMPLES` short ones, one with media in between if any has some; the same one again where there are too few.

    Samples that share no micro-batch with others (see `Cost.modality`) only where there is nothing else.
    """
    usable = [one for one in samples if one.cost.modality != VIDEO] or list(samples)
    by_length = sorted(usable, key=lambda one: (one.cost.tokens + one.cost.patches, one.id))
    with_media = [one for one in by_length if one.cost.has_media]
    without = [one for one in by_length if not one.cost.has_media]
    chosen = [*with_media[:1], *(without or with_media[1:])][:NUM_SAMPLES]
    if len(chosen) > 1 and with_media:
        chosen[0], chosen[1] = chosen[1], chosen[0]
    return list(itertools.islice(itertools.cycle(chosen), NUM_SAMPLES)) if chosen else []


def of_samples(samples: Sequence[Sample], padded: GroupDataset, flat: GroupDataset) -> Trial:
    """Through the run's own collator. padded, flat: what collates in either layout. Raises `DataError` if it fails."""
    ids = tuple(one.id for one in samples)
    row, segments = _collate(flat, samples)
    together, _ = _collate(padded, samples)
    if len(together["input_ids"]) < len(samples):  # the collator lays them into one row itself
        if not is_text(row):
            raise DataError("the collator lays samples with media into one row, which cannot be taken apart to compare")
        return of_flat_batch(row, segments[: len(samples)], ids)
    alone = [_collate(padded, [one])[0] for one in samples]
    # The same samples in a batch of another shape, in another order.
    other, _ = _collate(padded, [samples[-1], samples[0]])
    total = len(samples)
    assert isinstance(flat.layout, FlatLayout)
    inputs = functools.partial(_inputs, batches=flat.layout.batches)
    return Trial(
        tuple(LaidOut(inputs(batch), _rows(batch, samples, [number])) for number, batch in enumerate(alone)),
        (
            LaidOut(inputs(together), _rows(together, samples, range(total))),
            LaidOut(inputs(other), _rows(other, samples, [total - 1, 0])),
        ),
        LaidOut(inputs(row), _behind_each_other(segments[: len(together["input_ids"])]), segments),
        ids,
        has_logits=UNPADDED not in row,
    )


def is_text(batch: Mapping[str, Any]) -> bool:
    """Whether a flat batch holds text alone."""
    return set(batch) <= TEXT_KEYS and batch["position_ids"].dim() == 2


def of_flat_batch(batch: Mapping[str, Any], segments: Sequence[int], ids: tuple[int, ...] = ()) -> Trial:
    """A flat batch of text, cut apart again. segments: those of its samples, the first of the row.

    Of many samples `NUM_SAMPLES` are taken, of a single one twice and more.
    """
    spans = _behind_each_other(segments)
    pieces = [batch["input_ids"][0, start:end] for _, start, end in spans.values()]
    pieces = list(itertools.islice(itertools.cycle(pieces), NUM_SAMPLES))
    lengths = tuple(len(piece) for piece in pieces)
    row = {
        "input_ids": torch.cat(pieces)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).to(pieces[0].device)[None],
    }
    return Trial(
        tuple(LaidOut(_padded([piece]), {number: (0, 0, len(piece))}) for number, piece in enumerate(pieces)),
        tuple(
            LaidOut(_padded(pieces, more), {number: (number, 0, length) for number, length in enumerate(lengths)})
            for more in (0, FURTHER)
        ),
        LaidOut(row, _behind_each_other(lengths), lengths),
        ids,
    )


def _collate(group: GroupDataset, samples: Sequence[Sample]) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    measured, batch = group.collate(list(samples))
    return batch, measured.segments


def _inputs(batch: Mapping[str, Any], batches: Sequence[str]) -> dict[str, Any]:
    """Of the model. Without labels it computes logits, whatever its loss is computed by. batches: of `Collation`."""
    own = {key: batch[key] for key in model_keys(batch, batches) if key != UNPADDED}
    inputs = own | batch.get(UNPADDED, {}).get("inputs", {})
    return {key: value for key, value in inputs.items() if key != "labels" and value is not None}


def _rows(
    batch: Mapping[str, Any], samples: Sequence[Sample], numbers: Sequence[int]
) -> dict[int, tuple[int, int, int]]:
    """Of a padded batch of the samples of these numbers: padding is on either side, and dummy media are masked like it.

    Where samples have several rows each row is one here: the first ones of all samples, then the second ones.
    """
    mask = batch.get("attention_mask")
    spans = {}
    for row in range(len(batch["input_ids"])):
        turn, place = divmod(row, len(numbers))
        number = numbers[place]
        start = 0 if mask is None else int(mask[row].argmax())
        tokens = samples[number].cost.tokens if mask is None else int((mask[row] != 0).sum())
        spans[turn * len(samples) + number] = (row, start, start + tokens)
    return spans


def _behind_each_other(segments: Sequence[int]) -> dict[int, tuple[int, int, int]]:
    ends = [0, *itertools.accumulate(segments)]
    return {number: (0, start, end) for number, (start, end) in enumerate(itertools.pairwise(ends))}


def _padded(pieces: Sequence[Tensor], more: int = 0) -> dict[str, Any]:
    length = max(map(len, pieces)) + more
    ids = pieces[0].new_zeros(len(pieces), length)
    mask = torch.zeros_like(ids)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece)], mask[row, : len(piece)] = piece, 1
    return {"input_ids": ids, "attention_mask": mask}


# ----------------------------------------------------------------------------------------------------------------------

logger = get_logger(__name__)

ROWS_TRIED, TOKENS_TRIED = 16, 16384
"""The rows to choose from: at most so many, and no more once they have so many tokens. The main process reads them."""
TIMES_ROUNDING = 10
"""So much more than two padded layouts may a flat one differ."""
LEAST_EPS = 4
"""Of the dtype that is computed in, times the largest loss: what is rounding whatever the padded layouts say."""


class LayoutCheck:
    """loader: of the run, flat, an epoch begun. Samples are collated as its workers do it."""

    def __init__(self, loader: ODBLoader):
        self.loader = loader

    @property
    def needs_batch(self) -> bool:
        """Rows cannot be read by their number (a stream), so the first micro-batch is looked at."""
        return not self.loader.has_rows

    def of_rows(self, trainer: Any) -> str | None:
        """Why the flat layout cannot be used, by rows of the dataset; None if it can. Collective."""
        return _compare_on_all_ranks(trainer, self._trial)

    def _trial(self) -> Trial:
        logger.info("the check of the layout reads rows before the first step, at most %d", ROWS_TRIED)
        samples = list(rows_to_choose_from(self.loader.first_samples()))
        while chosen := choose(samples):
            try:
                return of_samples(chosen, self.loader.groups.padded(), self.loader.groups)
            except NotCollated as error:
                if len(error.ids) > 1:
                    raise
                logger.warning(
                    "the check of the layout passes over row %d, which cannot be collated: %s", *error.ids, error
                )
                samples = [sample for sample in samples if sample.id not in error.ids]
        raise DataError(f"none of the first {ROWS_TRIED} rows can be used to compare the layouts with")

    def of_batch(self, trainer: Any, batch: Any, segments: tuple[int, ...], num_samples: int) -> str | None:
        """The same by a flat micro-batch of text, cut apart. num_samples: those of its segments that are samples."""

        def trial() -> Trial:
            if not is_text(batch):
                raise DataError("samples of a stream with media cannot be taken apart to compare the layouts")
            return of_flat_batch(batch, segments[:num_samples])

        return _compare_on_all_ranks(trainer, trial)


def rows_to_choose_from(samples: Iterator[Sample]) -> Iterator[Sample]:
    """The first samples: long ones take long to tokenize, and there are short enough ones among few of them."""
    tokens = 0
    for number, sample in enumerate(itertools.islice(samples, ROWS_TRIED), start=1):
        yield sample
        tokens += sample.cost.tokens
        if number >= NUM_SAMPLES and tokens >= TOKENS_TRIED:
            return


def _compare_on_all_ranks(trainer: Any, make: Callable[[], Trial]) -> str | None:
    """Where a rank has nothing to compare no rank runs the model, whose wrapper may wait for all of them."""
    found, trial = {}, None
    try:
        trial = make()
    except Exception as error:
        found = {"error": one_line(error)}
    why = _of_all_ranks(trainer, found)
    if why is not None or trial is None:
        return why
    return compare(trainer, trial)


def compare(trainer: Any, trial: Trial) -> str | None:
    """Run the model on all layouts of `trial`; why flat is not what padded is, as all ranks see it. Collective."""
    why = _positions(trainer.model_wrapped, trial.flat.batch)
    if why is not None:  # on all ranks alike
        return why
    try:
        found = _deviations(trainer, trial)
    except Exception as error:
        return _of_all_ranks(trainer, {"error": one_line(error)})
    return _of_all_ranks(trainer, {**found, "rows": trial.ids})


def _positions(model: Any, batch: Mapping[str, Any]) -> str | None:
    """Whether the model would make positions of images itself, for which it needs rows: few samples may show none."""
    parts = unwrapped(model).modules()
    maker = next((type(part).__name__ for part in parts if hasattr(part, "get_rope_index")), None)
    if maker is None or batch["position_ids"].dim() == 3:
        return None
    return (
        f"the collator gives no position_ids, and {maker} can make those of images from padded rows only (a collator "
        "can call its get_rope_index, as LLaMA-Factory's does)"
    )


def _of_all_ranks(trainer: Any, found: dict[str, Any]) -> str | None:
    """The failure of the first rank that has one, if any."""
    of_ranks = [json.loads(answer) for answer in trainer._odb_gather(json.dumps(found).encode())]
    for rank, one in enumerate(of_ranks):
        where = f" (rank {rank})" if len(of_ranks) > 1 else ""
        if "error" in one:
            return f"the check of the layout could not be made{where}: {one['error'].rstrip('.')}"
        if one and not math.isfinite(one["loss"]):
            return (
                f"the model's loss of {_named(one['rows'])} is {one['loss']}{where}, each alone in a plain batch: its "
                "weights or its inputs are damaged, and no layout can be compared"
            )
        if one and not one["flat"] <= one["tolerance"]:  # also where it is no number
            return (
                f"the model computes something else on a flat row: token losses of {_named(one['rows'])} differ by "
                f"{one['flat']:.1e} from each alone, padded by {one['padded']:.1e}{where}"
            )
    return None


def _named(rows: list[int]) -> str:
    return f"rows {', '.join(map(str, dict.fromkeys(rows)))}" if rows else "the same samples"


def _deviations(trainer: Any, trial: Trial) -> dict[str, float]:
    """The largest token loss of samples alone, the largest differences from it, flat and padded, and the tolerance."""
    model = trainer.model_wrapped
    door = WithoutLogits(model)
    with _evaluating(model), torch.no_grad(), trainer.compute_loss_context_manager():
        alone: dict[int, Tensor] = {}
        with _dtypes_within(model) as dtypes:
            for laid_out in trial.alone:
                alone |= _token_losses(trainer, door, laid_out)
        padded = [_token_losses(trainer, door, laid_out) for laid_out in trial.padded]
        flat = _token_losses(trainer, door, trial.flat)
    if door.reason is not None and not trial.has_logits:
        raise DataError(door.reason)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes | {torch.float32})  # norms and softmax: float32 at most
    rounding = max(_difference(one, alone) for one in padded)
    every = torch.cat([losses.flatten() for losses in alone.values()])
    largest = float(every.abs().max()) if every.numel() else 0.0
    tolerance = max(TIMES_ROUNDING * rounding, LEAST_EPS * eps * max(largest, 1.0))
    return {"loss": largest, "flat": _difference(flat, alone), "padded": rounding, "tolerance": tolerance}


def _token_losses(trainer: Any, door: WithoutLogits, laid_out: LaidOut) -> dict[int, Tensor]:
    """Of each sample (by number) the loss of every token but its first, supervised or not: [tokens - 1]."""
    inputs = trainer._prepare_inputs(dict(laid_out.batch))
    ids = inputs["input_ids"]
    targets = torch.full_like(ids, IGNORE_INDEX)
    for row, start, end in laid_out.spans.values():
        targets[row, start : end - 1] = ids[row, start + 1 : end]

    def run() -> Any:
        with flat_row(laid_out.segments):
            return trainer.model_wrapped(**inputs)

    losses = door.token_losses(run, targets)
    if losses is None:
        losses = _by_logits(run(), targets)
    return {number: losses[row, start : end - 1] for number, (row, start, end) in laid_out.spans.items()}


def _by_logits(outputs: Any, targets: Tensor) -> Tensor:
    """[rows, length]; 0 where there is no target."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    if not isinstance(logits, Tensor) or logits.shape[:2] != targets.shape:
        raise DataError("the model returns no logits of all tokens to compare the layouts by")
    rows = [functional.cross_entropy(in_float32(row), target, reduction="none") for row, target in zip(logits, targets)]
    return torch.stack(rows)


def _difference(some: dict[int, Tensor], alone: dict[int, Tensor]) -> float:
    """The largest; a number that is none comes out as such."""
    found = [float((losses - alone[number]).abs().max()) for number, losses in some.items() if losses.numel()]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


@contextlib.contextmanager
def _dtypes_within(model: Any) -> Iterator[set[torch.dtype]]:
    """Those that its layers give out meanwhile: whoever set them (the weights, autocast, accelerate, FSDP)."""
    seen: set[torch.dtype] = set()

    def look(_: Any, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            seen.add(output.dtype)

    layers = [module for module in model.modules() if next(module.children(), None) is None]
    hooks = [layer.register_forward_hook(look) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without dropout; each module is as it was afterwards. Random numbers that are drawn are drawn again."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]):  # drawing on the device would be dropout
            yield
    finally:
        for module, training in before:
            module.training = training
