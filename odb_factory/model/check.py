"""Which layout a training gets: as configured, or with `auto` flat if nothing speaks against it (I10).

A reason of the caller's and streams come first; then, in this order:
1. `why_refused`: what no check computes (images, arguments of the training, releases), by name.
2. The attention kernel: `odb_varlen` takes the place of sdpa and eager if it computes the same; flash and flex
   attention stay; sdpa and eager otherwise are exact, but their cost grows with the square of the row, so an
   accelerator takes them only if asked to. Mixers that carry state along the row see padded groups of samples
   (`model/mixers.py`).
3. A tiny random copy of the model, on the host, in a second (`check`). Its samples have 5 to 80 tokens, and its
   windows, chunks, top-k and original contexts are shorter than most of them. Its numbers are float64, so the token
   losses of one flat row, compared with those of each sample alone in stock, show every leak. If they differ, they
   may still be those of a padded micro-batch. All ranks find the same: the check depends on class and config, draws its
   own random numbers and runs no collective.
4. The real model on a few short samples, before it is trained (`check_rows`): flat, padded and alone, in eval mode
   without gradients. The difference between padded and alone is rounding, which bounds that of flat.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from odb_factory.errors import DataError, LayoutError, one_line
from odb_factory.log import get_logger
from odb_factory.model import attention, mixers
from odb_factory.model.flat_row import call_all, flat_row
from odb_factory.model.head import WithoutLogits
from odb_factory.model.tiny_copy import WORDS, tiny_copy

logger = get_logger(__name__)


def unwrapped(model: Any) -> Any:
    """The model inside an adapter or an engine's wrapper, as far as they tell."""
    while True:
        if hasattr(model, "module"):
            model = model.module
        elif hasattr(model, "pretrained_model"):  # TRL's model with a reward head, whatever its name
            model = model.pretrained_model
        elif hasattr(model, "get_base_model"):  # PEFT's
            return model.get_base_model()
        else:
            return model


def models_of(trainer: Any) -> list[Any]:
    """The models that see a micro-batch: the one that is trained and, in some stages, its reference."""
    models = (trainer.model, getattr(trainer, "ref_model", None))
    return [unwrapped(model) for model in models if model is not None]


def shifts_labels(model: Any) -> bool:
    """Whether the Trainer has its label smoother shift the labels: for what transformers lists as a causal model."""
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


# ----------------------------------------------------------------------------------------------------------------------
# What no check computes, by name.

CROSS_ATTENTION = ("mllama",)
"""Models whose text attends to the images of its row."""


def why_refused(model: Any, args: Any) -> str | None:
    """Why the model (unwrapped) cannot take flat rows, with these arguments of the training; None: nothing is known."""
    name = type(model).__name__
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return f"{name} is not a model of transformers, and nothing is known of its attention"
    if model.config.model_type in CROSS_ATTENTION:
        return f"{model.config.model_type} attends from every token of a row to all images of that row"
    if getattr(args, "packing", False):  # of TRL's arguments
        return "packing: True makes rows of several samples, in each of which positions begin at 0 again"
    factor = getattr(args, "label_smoothing_factor", 0)
    if not factor or shifts_labels(model):
        return None
    return f"label_smoothing_factor: {factor} counts the first label of a sample for {name}, and a flat row has none"


# ----------------------------------------------------------------------------------------------------------------------
# The choice, and the model set up for it.

PRICE = "exact, but its attention costs the square of a whole row"


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a run. reason: why, in a few words.

    with_boundaries: the batch says where segments end, for kernels that would otherwise read it back from the device.
    undo: puts the model back as it was.
    """

    name: Literal["padded", "flat"]
    reason: str
    with_boundaries: bool = False
    undo: Callable[[], None] = lambda: None


def resolve_layout(
    models: Sequence[Any], layout: str, args: Any, *, refused: str | None = None, is_stream: bool = False
) -> Layout:
    """The layout of a training; with a flat one all models are set up for it.

    models: of `models_of`, without a wrapper of an engine. layout: as configured. args: of the training (device, bf16,
    ...). refused: why flat micro-batches would be wrong, if the caller knows a reason. is_stream: rows cannot be
    read by their number. Raises `LayoutError` if `layout: flat` is refused.
    """
    if layout == "padded":
        return Layout("padded", "as configured")
    if layout == "auto" and is_stream:
        return Layout("padded", "the rows of a stream cannot be looked at before training; `layout: flat` does without")
    why = refused or why_refused(models[0], args)
    return _padded(layout, why) if why is not None else _by_kernel(models, layout, args)


def fall_back(flat: Layout, layout: str, why: str) -> Layout:
    """The padded layout in the place of a flat one that was found wrong; the model is put back.

    layout: as configured. Raises `LayoutError` if that is flat.
    """
    padded = _padded(layout, why)
    flat.undo()
    return padded


def _padded(layout: str, why: str) -> Layout:
    if layout == "flat":
        raise LayoutError(why)
    return Layout("padded", why)


def _by_kernel(models: Sequence[Any], layout: str, args: Any) -> Layout:
    model = models[0]
    kernel = attention.text_config(model)._attn_implementation or "eager"
    reason = "as configured" if layout == "flat" else "model and attention kernel allow it"
    computed, price, with_boundaries, install = f"attention by {kernel}", None, False, False
    if not mixers.has_attention(model):
        computed = ""
    elif "flash" in kernel:
        kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
        with_boundaries = inspect.Parameter.VAR_KEYWORD in kinds
    elif kernel in ("sdpa", "eager"):
        why_not = attention.why_unusable(model) or _why_wrong(models, installs=True)
        install = why_not is None
        if install:
            dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else model.dtype
            computed = f"attention by {attention.NAME}: {attention.expected(model, args.device, dtype)}"
        else:
            price = f"{kernel}: {PRICE}; {attention.NAME} does not take its place: {why_not}"
            computed = f"attention by {price}"
    elif kernel != "flex_attention" and layout != "flat":
        return _padded(layout, f"nothing is known of the attention kernel {kernel}")
    if not install and (why := _why_wrong(models, installs=False)) is not None:
        return _padded(layout, why)
    if price is not None and args.device.type != "cpu" and layout != "flat":
        return _padded(layout, f"{price}; `layout: flat` has it all the same")
    undo: list[Callable[[], None]] = []
    try:
        for each in models:
            undo.append(without_cache(each))
            undo.append(mixers.install(each))
            if install:
                undo.append(attention.install(each))
    except LayoutError as error:
        call_all(undo)
        return _padded(layout, error.reason)
    mixed = mixers.describe(model)
    parts = [reason, *filter(None, (computed, mixed and f"{mixed} by padded groups of samples"))]
    return Layout("flat", f"{parts[0]}, {'; '.join(parts[1:])}", with_boundaries, functools.partial(call_all, undo))


def _why_wrong(models: Sequence[Any], *, installs: bool) -> str | None:
    for each in {(type(each), each.config.to_json_string()): each for each in models}.values():
        kernel = attention.text_config(each)._attn_implementation
        if (why := check(type(each), each.config, kernel, installs=installs)) is not None:
            return why
    return None


def without_cache(model: Any) -> Callable[[], None]:
    """Switch off the cache of keys and values, beside which transformers does not look for samples in a row.

    Training has no use for it; the Trainer itself switches it off, but not in the config of a language model that is a
    part of a larger one.
    """
    configs = [config for config in (model.config, attention.text_config(model)) if getattr(config, "use_cache", None)]
    for config in configs:
        config.use_cache = False
    return functools.partial(call_all, [functools.partial(setattr, config, "use_cache", True) for config in configs])


# ----------------------------------------------------------------------------------------------------------------------
# The check of a tiny random copy.

LENGTHS = (33, 5, 80, 21, 47)
"""Tokens of the samples."""
SAME = 1e-4
"""Allowed difference of a token loss, as a part of the mean loss. In the families that were tried, rounding (of parts
in float32) is at most 1e-6, and a leak of one sample into another at least 1e-2."""
COMPUTED_HERE = ("sdpa", "eager", "flex_attention")
"""Attention functions that the copy computes as the model does; flex attention has the masks of sdpa."""


def check(model_class: Any, config: Any, kernel: str | None, *, installs: bool) -> str | None:
    """Why flat rows would be wrong; None if they are right, or no copy can be run (logged).

    Of a `PreTrainedModel` only class and config are looked at. kernel: the attention function of the training; None:
    the class's own. installs: the training puts `odb_varlen` in its place. The copy gets `mixers.install`, as the real
    model will.

    why = check(type(model), model.config, "sdpa", installs=attention.why_unusable(model) is None)
    if why is not None:
        raise LayoutError(why)
    """
    name = model_class.__name__
    try:
        error, tolerance = compare_copy(model_class, config, kernel, installs=installs)
    except LayoutError as wrong:
        return wrong.reason
    except Exception as error_of_copy:
        reason = f"a tiny copy of {name} cannot be run: {one_line(error_of_copy)}"
        logger.info("the layout is checked on real rows alone: %s", reason)
        return None
    if error <= tolerance:
        return None
    return (
        f"{name} computes something else on a flat row: in a tiny copy of it token losses differ by {error:.1e} from "
        f"those of each sample alone, where rounding is less than {tolerance:.0e}"
    )


def compare_copy(
    model_class: Any, config: Any, kernel: str | None, *, installs: bool, segments: Sequence[int] = LENGTHS
) -> tuple[float, float]:
    """The largest difference of a token loss of a flat row of a tiny copy, and what is allowed. NaN: no number.

    segments: lengths that the copy is told in place of the samples'; other arguments: of `check`. Raises `LayoutError`
    if the copy fails on a flat row alone, `DataError` if it cannot compute attention as the training does, or an error
    of the class.
    """
    is_flash = kernel is not None and "flash" in kernel
    if kernel is not None and kernel not in COMPUTED_HERE and not is_flash:
        raise DataError(f"nothing is known of the attention function {kernel}")
    own = "sdpa" if getattr(model_class, "_supports_sdpa", True) else "eager"
    with torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False), quiet():
        model = tiny_copy(model_class, config, kernel if kernel in (None, "eager") else own)
        if is_flash and (why := attention.why_unusable(model)) is not None:
            raise DataError(f"{kernel} does not run on the host, and {why}")
        generator = torch.Generator().manual_seed(0)
        pieces = [torch.randint(*WORDS, (length,), generator=generator) for length in LENGTHS]
        trial = of_pieces(pieces)
        losses_of = functools.partial(_losses_of_copy, model, installs or is_flash)
        alone: dict[int, Tensor] = {}
        for number, laid_out in enumerate(trial.alone):
            if is_flash:  # flash attention has no mask, as in a flat row of this sample
                laid_out = replace(of_pieces([pieces[number]]).flat, spans=laid_out.spans)
            alone |= losses_of(laid_out)
        every = torch.cat(list(alone.values()))
        if not every.isfinite().all():
            raise DataError("its loss is not a number")
        positions = torch.cat([torch.arange(length) for length in segments])[None]
        row = replace(trial.flat, batch={**trial.flat.batch, "position_ids": positions}, segments=tuple(segments))
        try:
            flat = losses_of(row)
        except Exception as error:
            raise LayoutError(f"{model_class.__name__} fails on a flat row: {one_line(error)}") from error
        tolerance = SAME * float(every.abs().mean())
        difference = _difference(flat, alone)
        if not difference <= tolerance:  # in stock, too, a loss may depend on the longest sample of a micro-batch
            difference = min(difference, _difference(flat, losses_of(trial.padded[0])))
    return difference, tolerance


def _losses_of_copy(model: Any, installs: bool, laid_out: LaidOut) -> dict[int, Tensor]:
    """As `_token_losses`. Every run has a copy of its own: rotary positions remember the longest row."""
    model, batch, spans = copy.deepcopy(model), dict(laid_out.batch), laid_out.spans
    if laid_out.segments:
        mixers.install(model)
        if installs:
            attention.install(model)
    ids, takes = batch["input_ids"], inspect.signature(model.forward).parameters
    batch |= {name: torch.zeros_like(ids) for name in ("token_type_ids", "mm_token_type_ids") if name in takes}
    if "token_type_ids" in batch:  # the second half of a sample is of another type; none is of an image
        for row, start, end in spans.values():
            batch["token_type_ids"][row, start + (end - start) // 2 : end] = 1
    with flat_row(laid_out.segments):
        losses = _by_logits(model(**batch), functional.pad(ids, (0, 1))[:, 1:])
    return {number: losses[row, start : end - 1] for number, (row, start, end) in spans.items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what transformers logs about the copy."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


# ----------------------------------------------------------------------------------------------------------------------
# The check of the real model on a few short samples.

TIMES_ROUNDING = 10
"""Allowed difference of flat, as a multiple of the difference between padded and alone."""
LEAST_EPS = 4
"""Allowed difference in any case: this multiple of the rounding of the dtype, times the largest loss."""


NUM_SAMPLES = 3
"""Samples of the check on each rank."""
TEXT_KEYS = {
    *("input_ids", "labels", "position_ids"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}
"""What a flat batch of text has: it can be cut apart again."""
FURTHER = 8
"""Tokens by which the second padded layout of a batch that was cut apart is longer."""
Span = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A batch without labels. spans: number of a sample -> (row, first token, end). segments: of a flat row."""

    batch: dict[str, Any]
    spans: dict[int, Span]
    segments: tuple[int, ...] = ()

    def tokens(self) -> dict[int, Tensor]:
        """Of each sample, by its number."""
        return {number: self.batch["input_ids"][row, start:end] for number, (row, start, end) in self.spans.items()}


@dataclass(frozen=True, slots=True)
class Trial:
    """Samples by their number: each alone, padded in two ways, flat. As many batches whatever the samples, so that
    ranks run the model equally often. ids: rows of the dataset. has_logits: a flat micro-batch is trained with them."""

    alone: list[LaidOut]
    padded: list[LaidOut]
    flat: LaidOut
    ids: tuple[int, ...] = ()
    has_logits: bool = True


def of_batches(
    alone: Sequence[dict[str, Any]],
    padded: Sequence[dict[str, Any]],
    flat: dict[str, Any],
    segments: Sequence[int],
    tokens: Sequence[int],
    ids: tuple[int, ...],
    has_logits: bool,
) -> Trial:
    """Model inputs of the same samples. alone: of each. padded: of all, and of the last and the first; both are empty
    if samples can only be collated flat. segments: of `flat`; tokens, ids: of the samples; has_logits: of `Trial`.

    Padding is on either side, and dummy media are masked like it. If samples have several rows, each row is a
    sample here: the first rows of all samples, then the second ones.
    """
    total = len(ids)
    if not alone:
        return of_flat_batch(flat, segments[:total], ids)

    def in_rows(batch: dict[str, Any], *numbers: int) -> LaidOut:
        mask = batch.get("attention_mask")
        spans = {}
        for row in range(len(batch["input_ids"])):
            turn, place = divmod(row, len(numbers))
            start = 0 if mask is None else int((mask[row] != 0).int().argmax())  # torch has no argmax of bools
            length = tokens[numbers[place]] if mask is None else int((mask[row] != 0).sum())
            spans[turn * total + numbers[place]] = (row, start, start + length)
        return LaidOut(batch, spans)

    together, pair = padded
    trial = Trial(
        [in_rows(batch, number) for number, batch in enumerate(alone)],
        [in_rows(together, *range(total)), in_rows(pair, total - 1, 0)],
        LaidOut(flat, _behind_each_other(segments[: len(together["input_ids"])]), tuple(segments)),
        ids,
        has_logits,
    )
    of_alone = {number: tokens for laid_out in trial.alone for number, tokens in laid_out.tokens().items()}
    for number, tokens_beside in (pair for rows in (*trial.padded, trial.flat) for pair in rows.tokens().items()):
        if not torch.equal(tokens_beside, of_alone[number]):
            raise LayoutError(
                f"the collator sorts or changes its rows: beside others row {ids[number % total]} has other tokens "
                "than alone"
            )
    return trial


def of_flat_batch(batch: Mapping[str, Any], segments: Sequence[int], ids: tuple[int, ...] = ()) -> Trial:
    """A flat batch of text, cut apart again. segments: those of its samples, the first of the row.

    Of many samples `NUM_SAMPLES` are taken, of a single one twice and more. Raises `DataError` for media.
    """
    if not set(batch) <= TEXT_KEYS or batch["position_ids"].dim() != 2:
        raise DataError("samples with media that lie in one row cannot be taken apart to compare the layouts")
    spans = _behind_each_other(segments)
    pieces = [batch["input_ids"][0, start:end] for _, start, end in spans.values()]
    pieces = list(itertools.islice(itertools.cycle(pieces), NUM_SAMPLES))
    return of_pieces(pieces, ids)


def of_pieces(pieces: list[Tensor], ids: tuple[int, ...] = ()) -> Trial:
    """pieces: the tokens of each sample, int64[length]."""
    lengths, numbers = tuple(map(len, pieces)), range(len(pieces))

    def padded(of: Sequence[Tensor], more: int, numbers: Sequence[int]) -> LaidOut:
        length = max(map(len, of)) + more
        padded_ids = torch.stack([functional.pad(piece, (0, length - len(piece))) for piece in of])
        mask = torch.stack([(torch.arange(length) < len(piece)).long() for piece in of]).to(padded_ids.device)
        spans = {number: (row, 0, len(of[row])) for row, number in enumerate(numbers)}
        return LaidOut({"input_ids": padded_ids, "attention_mask": mask}, spans)

    row = {
        "input_ids": torch.cat(pieces)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).to(pieces[0].device)[None],
    }
    return Trial(
        [padded([piece], 0, [number]) for number, piece in zip(numbers, pieces)],
        [padded(pieces, more, numbers) for more in (0, FURTHER)],
        LaidOut(row, _behind_each_other(lengths), lengths),
        ids,
    )


def _behind_each_other(segments: Sequence[int]) -> dict[int, Span]:
    ends = [0, *itertools.accumulate(segments)]
    return {number: (0, start, end) for number, (start, end) in enumerate(itertools.pairwise(ends))}


@dataclass(frozen=True, slots=True)
class Runs:
    """How a training runs its model. model: as wrapped. prepare: moves inputs to the device. gather: gives what each
    rank says (JSON types) to all ranks. context: of autocast."""

    model: Any
    prepare: Callable[[dict[str, Any]], dict[str, Any]]
    gather: Callable[[Any], list[Any]]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def check_rows(runs: Runs, make: Callable[[], Trial]) -> str | None:
    """Why flat rows are not what padded ones are, as all ranks see it; None if they are. Collective.

    If `make` fails on a rank no rank runs the model, whose wrapper may wait for all of them.
    """
    answer: dict[str, Any] = {}
    trial = None
    try:
        trial = make()
    except Exception as error:
        answer = {"error": _reason(error)}
    why = _of_all_ranks(runs, answer)
    if why is not None or trial is None:
        return why
    why = _positions(runs.model, trial.flat.batch)
    if why is not None:  # on all ranks alike
        return why
    try:
        answer = {**_deviations(runs, trial), "rows": trial.ids}
    except Exception as error:
        answer = {"error": _reason(error)}
    return _of_all_ranks(runs, answer)


def _reason(error: Exception) -> str:
    if isinstance(error, LayoutError):
        return error.reason
    return f"the check of the layout could not be made: {one_line(error).rstrip('.')}"


def _positions(model: Any, batch: Mapping[str, Any]) -> str | None:
    """Why not: the model would make positions of images itself, for which it needs rows (few samples may show none)."""
    maker = _makes_positions(model)
    if maker is None or batch["position_ids"].dim() == 3:
        return None
    return (
        f"the collator gives no position_ids, and {type(maker).__name__} makes those of images from padded rows only "
        "(a collator can call its get_rope_index, as LLaMA-Factory's does)"
    )


def _makes_positions(model: Any) -> Any:
    return next((part for part in unwrapped(model).modules() if hasattr(part, "get_rope_index")), None)


def positions_of_media(model: Any) -> Callable[[Mapping[str, Any]], Tensor] | None:
    """A function that makes the positions of images and text of a padded batch as the model does, [3, rows, length].

    None if the model makes none, or makes them of something else than arguments of its forward.
    """
    maker = _makes_positions(model)
    if maker is None or not _named_parameters(maker.get_rope_index) <= _named_parameters(maker.forward):
        return None
    return functools.partial(_rotary_positions, maker.get_rope_index)


def _named_parameters(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}


def _rotary_positions(get_rope_index: Callable[..., Any], batch: Mapping[str, Any]) -> Tensor:
    takes = _named_parameters(get_rope_index)
    arguments = {name: value for name, value in batch.items() if name in takes}
    if "mm_token_type_ids" in takes:  # without them the model counts all tokens as text
        arguments.setdefault("mm_token_type_ids", torch.zeros_like(batch["input_ids"]))
    try:
        positions: Tensor = get_rope_index(**arguments)[0]
    except Exception as error:
        raise LayoutError(f"get_rope_index of the model fails: {one_line(error)}") from error
    return positions


def _of_all_ranks(runs: Runs, answer: dict[str, Any]) -> str | None:
    """The failure of the first rank that has one, if any."""
    answers = runs.gather(answer)
    for rank, answer in enumerate(answers):
        where = f" (rank {rank})" if len(answers) > 1 else ""
        if "error" in answer:
            return f"{answer['error']}{where}"
        if answer and not math.isfinite(answer["loss"]):
            return (
                f"the model's loss of {_named(answer['rows'])} is {answer['loss']}{where}, each alone in a plain "
                "batch: its weights or its inputs are damaged, and no layout can be compared"
            )
        if answer and not answer["flat"] <= answer["tolerance"]:  # also if it is not a number
            return (
                f"the model computes something else on a flat row: token losses of {_named(answer['rows'])} differ by "
                f"{answer['flat']:.1e} from each alone, padded by {answer['padded']:.1e}{where}"
            )
    return None


def _named(rows: Sequence[int]) -> str:
    return f"rows {', '.join(map(str, dict.fromkeys(rows)))}" if rows else "the same samples"


def _deviations(runs: Runs, trial: Trial) -> dict[str, float]:
    """The largest token loss of samples alone, the largest differences from it, flat and padded, and the tolerance."""
    door = WithoutLogits(runs.model)
    with _evaluating(runs.model), runs.context():
        alone: dict[int, Tensor] = {}
        with _dtypes_seen() as dtypes:
            for laid_out in trial.alone:
                alone |= _token_losses(runs, door, laid_out)
        padded = [_difference(_token_losses(runs, door, laid_out), alone) for laid_out in trial.padded]
        flat = _token_losses(runs, door, trial.flat)
    if door.reason is not None and not trial.has_logits:
        raise DataError(door.reason)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes | {torch.float32})  # norms and softmax: float32 at most
    every = torch.cat([losses.flatten() for losses in alone.values()])
    largest = float(every.abs().max()) if every.numel() else 0.0
    tolerance = max(TIMES_ROUNDING * max(padded), LEAST_EPS * eps * max(largest, 1.0))
    return {"loss": largest, "flat": _difference(flat, alone), "padded": max(padded), "tolerance": tolerance}


def _token_losses(runs: Runs, door: WithoutLogits, laid_out: LaidOut) -> dict[int, Tensor]:
    """Of each sample (by number) the loss of every token but its first, supervised or not: [tokens - 1]."""
    inputs = runs.prepare(dict(laid_out.batch))
    ids = inputs["input_ids"]
    labels = torch.full_like(ids, -100)
    for row, start, end in laid_out.spans.values():
        labels[row, start + 1 : end] = ids[row, start + 1 : end]

    def run() -> Any:
        with flat_row(laid_out.segments):
            return runs.model(**inputs)

    if door.reason is None:
        _, places, log_probs, _ = door.log_probs(run, labels)
        losses = log_probs.new_zeros(ids.numel()).index_copy(0, places, -log_probs).view(ids.shape)
    else:
        losses = _by_logits(run(), functional.pad(labels, (0, 1), value=-100)[:, 1:])
    return {number: losses[row, start : end - 1] for number, (row, start, end) in laid_out.spans.items()}


def _by_logits(outputs: Any, targets: Tensor) -> Tensor:
    """[rows, length]: the loss of each target (0 if there is none), or the score of each token if the model
    returns one."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    if not isinstance(logits, Tensor) or logits.shape[:2] != targets.shape:
        raise DataError("the model returns no logits of all tokens to compare the layouts by")
    rows = (row if row.dtype == torch.float64 else row.float() for row in logits)
    if logits.shape[-1] == 1:
        return torch.stack([row[:, 0] for row in rows])
    return torch.stack([functional.cross_entropy(row, own, reduction="none") for row, own in zip(rows, targets)])


def _difference(some: dict[int, Tensor], alone: dict[int, Tensor]) -> float:
    """The largest difference; NaN if there is one."""
    differences = [float((losses - alone[number]).abs().max()) for number, losses in some.items() if losses.numel()]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)


@contextlib.contextmanager
def _dtypes_seen() -> Iterator[set[torch.dtype]]:
    """Those that modules give out meanwhile: whoever set them (the weights, autocast, accelerate, FSDP)."""
    dtypes: set[torch.dtype] = set()

    def look(_: Any, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            dtypes.add(output.dtype)

    hook = register_module_forward_hook(look)
    try:
        yield dtypes
    finally:
        hook.remove()


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without gradients, dropout and checkpoints; each module is as it was afterwards."""
    before = [(module, module.training) for module in model.modules()]
    for module, _ in before:
        module.training = False
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # drawing on the device would be dropout
            yield
    finally:
        for module, training in before:
            module.training = training
