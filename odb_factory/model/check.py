"""The layout of a training: as configured; `auto` is flat if no reason speaks against it (I10).

A stream and a reason of the caller come first; then, in this order:
1. `why_refused` refuses by name what no check shows: models, arguments of the training.
2. The attention kernel. `odb_varlen` replaces sdpa and eager if it computes the same. Otherwise sdpa and eager are
   exact, but their cost grows with the square of the row, so an accelerator uses them only with `layout: flat`. Flash
   and flex attention are kept. Mixers that carry state along the row get padded groups of samples (`model/mixers.py`).
3. `check` runs a tiny random copy of the model on the host, for about a second. Its samples have 5 to 80 tokens, and
   its windows, chunks, top-k and original contexts are shorter than most samples. It computes in float64, so a
   comparison of the token losses of a flat row and of each sample alone shows every leak. A flat row may also equal
   the padded micro-batch instead. All ranks get the same result: the check depends on class and config, has its own
   random numbers and runs no collective.
4. `check_rows` runs the real model on a few short samples before training: flat, padded and alone, in eval mode without
   gradients. The difference between padded and alone is rounding, and bounds the difference of flat.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from odb_factory.errors import DataError, LayoutError, one_line
from odb_factory.log import get_logger
from odb_factory.model import attention, mixers
from odb_factory.model.flat_row import call_all, flat_row, positions_of
from odb_factory.model.head import WithoutLogits
from odb_factory.model.tiny_copy import WORDS, tiny_copy

logger = get_logger(__name__)


def unwrapped(model: Any) -> Any:
    """The model inside adapters and wrappers of engines."""
    while True:
        if hasattr(model, "module"):
            model = model.module
        elif hasattr(model, "pretrained_model"):  # TRL's models with a reward or value head
            model = model.pretrained_model
        elif hasattr(model, "get_base_model"):  # PEFT's
            return model.get_base_model()
        else:
            return model


def models_of(trainer: Any) -> list[Any]:
    """The models that compute a micro-batch: the trained model and, in some stages, its reference."""
    models = (trainer.model, getattr(trainer, "ref_model", None))
    return [unwrapped(model) for model in models if model is not None]


CROSS_ATTENTION = ("mllama",)
"""Models whose text tokens attend to all images of their row."""


def why_refused(model: Any, args: Any) -> str | None:
    """A reason against flat rows that no check shows: model and arguments of the training; None if there is none.

    model: without wrappers."""
    name = type(model).__name__
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return f"{name} is not a model of transformers, so its attention is unknown"
    if model.config.model_type in CROSS_ATTENTION:
        return f"{model.config.model_type} attends from every token of a row to all images of that row"
    if getattr(args, "packing", False):  # of TRL's arguments
        return "packing: True makes rows of several samples, in each of which positions begin at 0 again"
    if getattr(args, "neftune_noise_alpha", None) is not None:
        return "neftune_noise_alpha: the noise would be scaled by the length of the whole row"
    factor = getattr(args, "label_smoothing_factor", 0)
    if not factor or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():  # the Trainer shifts the labels of these
        return None
    return f"label_smoothing_factor: {factor} counts the first label of a sample for {name}, and a flat row has none"


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a run. reason: in a few words.

    with_boundaries: batches contain the ends of segments, for kernels that would otherwise read them back from the
    device. undo: restores the model.
    """

    name: Literal["padded", "flat"]
    reason: str
    with_boundaries: bool = False
    undo: Callable[[], None] = lambda: None


def resolve_layout(
    models: Sequence[Any], layout: str, args: Any, *, refused: str | None = None, is_stream: bool = False
) -> Layout:
    """The layout of a training. If it is flat, all models are set up for it.

    models: as `models_of` returns them. layout: as configured. args: of the training (device, bf16, ...). refused: a
    reason of the caller against flat micro-batches. is_stream: rows cannot be read by number. Raises `LayoutError` if
    `layout: flat` is refused.
    """
    if layout == "padded":
        return Layout("padded", "as configured")
    if layout == "auto" and is_stream:
        reason = "the rows of a stream cannot be checked before training; `layout: flat` checks the first micro-batch"
        return Layout("padded", reason)
    try:
        if (why := refused or why_refused(models[0], args)) is not None:
            raise LayoutError(why)
        return _flat(models, layout, args)
    except LayoutError as error:
        if layout == "flat":
            raise
        return Layout("padded", error.reason)


def fall_back(flat: Layout, layout: str, why: str) -> Layout:
    """Replace a flat layout that failed its check (`why`) by the padded one, and restore the model.

    layout: as configured. Raises `LayoutError` if it is `flat`.
    """
    if layout == "flat":
        raise LayoutError(why)
    flat.undo()
    return Layout("padded", why)


def _flat(models: Sequence[Any], layout: str, args: Any) -> Layout:
    """The flat layout for the attention kernel of the model. Raises `LayoutError` if flat rows are wrong for it."""
    model = models[0]
    # How attention keeps the samples of a row apart: its own boundaries, our kernel, or a mask.
    kernel = attention.text_config(model)._attn_implementation or "eager"
    computed, with_boundaries, is_slow = f"attention by {kernel}", False, False
    doors = [without_cache, mixers.install]
    if not mixers.has_attention(model):
        computed = ""
    elif "flash" in kernel:
        kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
        with_boundaries = inspect.Parameter.VAR_KEYWORD in kinds
    elif kernel in ("sdpa", "eager"):
        why_not = attention.why_unusable(model) or _why_wrong(models, installs=True)
        if why_not is not None:
            is_slow = True
            computed += f": exact, but its cost is the square of a whole row; {attention.NAME} cannot replace it: "
            computed += why_not
        else:
            doors.append(attention.install)
            dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else model.dtype
            computed = f"attention by {attention.NAME}: {attention.expected(model, args.device, dtype)}"
    elif kernel != "flex_attention" and layout != "flat":
        raise LayoutError(f"the attention kernel {kernel} is unknown")
    # The doors are tried on a tiny copy, then opened on the models.
    if attention.install not in doors and (why := _why_wrong(models, installs=False)) is not None:
        raise LayoutError(why)
    if is_slow and args.device.type != "cpu" and layout != "flat":
        raise LayoutError(f"{computed.removeprefix('attention by ')}; `layout: flat` accepts that")
    undo: list[Callable[[], None]] = []
    try:
        for one_model, door in itertools.product(models, doors):
            undo.append(door(one_model))
    except LayoutError:
        call_all(undo)
        raise
    mixed = " and ".join({type(mixer).__name__: None for mixer in mixers.find(model)})
    reason = "as configured" if layout == "flat" else "model and attention kernel allow it"
    how = "; ".join(filter(None, (computed, mixed and f"{mixed} by padded groups of samples")))
    return Layout("flat", f"{reason}, {how}", with_boundaries, functools.partial(call_all, undo))


def _why_wrong(models: Sequence[Any], *, installs: bool) -> str | None:
    for model in {(type(model), model.config.to_json_string()): model for model in models}.values():
        kernel = attention.text_config(model)._attn_implementation
        if (why := check(type(model), model.config, kernel, installs=installs)) is not None:
            return why
    return None


def without_cache(model: Any) -> Callable[[], None]:
    """Switch off the cache of keys and values: with a cache, transformers does not look for samples in a row.

    The Trainer does the same, but not in the config of a language model that is a part of a larger model.
    """
    configs = [config for config in (model.config, attention.text_config(model)) if getattr(config, "use_cache", None)]
    for config in configs:
        config.use_cache = False
    return functools.partial(call_all, [functools.partial(setattr, config, "use_cache", True) for config in configs])


# The check of a tiny random copy.

LENGTHS = (33, 5, 80, 21, 47)
"""Tokens of the samples."""
SAME = 1e-4
"""Allowed difference of a token loss, as a part of the mean loss. In the tested families rounding (of float32 parts) is
at most 1e-6, and a leak of one sample into another at least 1e-2."""
COMPUTED_HERE = ("sdpa", "eager", "flex_attention")
"""Attention functions that the copy can compute; flex attention has the masks of sdpa."""


def check(model_class: Any, config: Any, kernel: str | None, *, installs: bool) -> str | None:
    """Why flat rows are wrong for a model; None if they are right, or no copy can be run (logged).

    model_class, config: of a `PreTrainedModel`. kernel: the attention function of the training; None: the default of
    the class. installs: the training replaces it by `odb_varlen`. The copy gets `mixers.install`, like the real model.

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
    """The largest difference of a token loss of a flat row in a tiny copy (NaN if one is NaN), and the allowed one.

    segments: lengths given to the copy, right or wrong. Other arguments: see `check`. Raises `LayoutError` if the copy
    fails on a flat row only, `DataError` if the host cannot compute the attention function, or an error of the class.
    """
    if kernel is not None and kernel not in COMPUTED_HERE:
        raise DataError(f"the attention function {kernel} does not run on the host")
    own = "sdpa" if getattr(model_class, "_supports_sdpa", True) else "eager"
    with torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False), quiet():
        model = tiny_copy(model_class, config, kernel if kernel in (None, "eager") else own)
        types = {"token_type_ids", "mm_token_type_ids"} & inspect.signature(model.forward).parameters.keys()

        def losses_of(batch: Mapping[str, Any], true_segments: tuple[int, ...]) -> Tensor:
            fresh = copy.deepcopy(model)  # RoPE remembers the longest row
            row_segments = segments if true_segments else ()
            inputs = {**batch, **{name: torch.zeros_like(batch["input_ids"]) for name in types}}
            if "token_type_ids" in types:
                inputs["token_type_ids"] = (batch["input_ids"] > sum(WORDS) // 2).long()
            if row_segments:
                inputs["position_ids"] = positions_of(row_segments)[None]
                mixers.install(fresh)
                if installs:
                    attention.install(fresh)
            try:
                return _token_losses(fresh, None, inputs, row_segments)
            except Exception as error:
                if row_segments:
                    raise LayoutError(f"{model_class.__name__} fails on a flat row: {one_line(error)}") from error
                raise

        generator = torch.Generator().manual_seed(0)
        trial = of_pieces([torch.randint(*WORDS, (length,), generator=generator) for length in LENGTHS])
        alone, padded, flat = _losses(trial, losses_of)
    if not alone.isfinite().all():
        raise DataError("its loss is not a number")
    tolerance, difference = SAME * float(alone.abs().mean()), _largest(flat - alone)
    if not difference <= tolerance:  # in stock a loss may depend on the longest sample of its micro-batch
        difference = min(difference, _largest(flat - padded))
    return difference, tolerance


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the log of transformers about the copy."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


# The check of the real model on a few short samples.

TIMES_ROUNDING = 10
"""Allowed difference of flat, as a multiple of the difference between padded and alone."""
LEAST_EPS = 4
"""Difference that is always allowed: this multiple of the rounding of the dtype, times the largest loss."""
NUM_SAMPLES = 3
"""Samples of the check on each rank."""
TEXT_KEYS = {
    *("input_ids", "labels", "position_ids", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}
"""Keys of a flat batch of text, which can be cut into its samples."""


class Trial(NamedTuple):
    """Model inputs of the same samples: each alone, all padded, all in one flat row of these segments.

    alone is empty if samples can only be collated flat. tokens, ids: of the samples. has_logits: training computes
    logits of a flat micro-batch. Padding is on either side; dummy media are masked, too. Samples may have several rows:
    first the first row of every sample, then the second rows.
    """

    alone: Sequence[Mapping[str, Any]]
    padded: Mapping[str, Any]
    flat: Mapping[str, Any]
    segments: tuple[int, ...]
    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    has_logits: bool


def of_flat_batch(batch: Mapping[str, Any], segments: Sequence[int], ids: tuple[int, ...] = ()) -> Trial:
    """Cut a flat batch of text into `NUM_SAMPLES` of its samples, repeated if it has fewer.

    segments: of the samples, without what follows them in the row. Raises `DataError` for media.
    """
    if (others := set(batch) - TEXT_KEYS) or batch["position_ids"].dim() != 2:
        media = ", ".join(sorted(others)) or "positions of media"
        raise DataError(f"a flat row with {media} cannot be cut into its samples to compare the layouts")
    pieces = batch["input_ids"][0, : sum(segments)].split(list(segments))
    return of_pieces(list(itertools.islice(itertools.cycle(pieces), NUM_SAMPLES)), ids)


def of_pieces(pieces: Sequence[Tensor], ids: tuple[int, ...] = ()) -> Trial:
    """pieces: the tokens of each sample, int64[length]."""

    def padded(*rows: Tensor) -> dict[str, Any]:
        masks = [torch.ones_like(row) for row in rows]
        return {
            "input_ids": pad_sequence(list(rows), batch_first=True),
            "attention_mask": pad_sequence(masks, batch_first=True),
        }

    lengths = tuple(map(len, pieces))
    row = {"input_ids": torch.cat(list(pieces))[None], "position_ids": positions_of(lengths)[None].to(pieces[0].device)}
    return Trial([padded(piece) for piece in pieces], padded(*pieces), row, lengths, lengths, ids, True)


def _by_row(
    trial: Trial, values_of: Callable[[Mapping[str, Any], tuple[int, ...]], Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """The values of the tokens of each row: alone, padded, flat. values_of: batch, segments (none: padded) ->
    [rows, length]."""

    def without_padding(batch: Mapping[str, Any], tokens: Sequence[int]) -> list[Tensor]:
        values, mask = values_of(batch, ()), batch.get("attention_mask")
        if mask is None:
            return [row[:count] for row, count in zip(values, itertools.cycle(tokens))]
        return [row[row_mask != 0] for row, row_mask in zip(values, mask.to(values.device))]

    by_sample = [without_padding(batch, [tokens]) for batch, tokens in zip(trial.alone, trial.tokens)]
    alone, padded = list(itertools.chain(*zip(*by_sample))), without_padding(trial.padded, trial.tokens)
    lengths = list(trial.segments[: len(padded)])
    return alone, padded, values_of(trial.flat, trial.segments)[0, : sum(lengths)].split(lengths)


def _losses(trial: Trial, losses_of: Callable[[Mapping[str, Any], tuple[int, ...]], Tensor]) -> list[Tensor]:
    """Token losses alone, padded and flat, [tokens] each, without the first token of a row, which has no loss."""
    return [torch.cat([row[1:] for row in rows]) for rows in _by_row(trial, losses_of)]


def _largest(differences: Tensor) -> float:
    """The largest absolute value; NaN if one is NaN."""
    return float(functional.pad(differences.abs(), (0, 1)).max())


@dataclass(frozen=True, slots=True)
class Runs:
    """How a training runs its model. model: wrapped. prepare: moves inputs to the device. gather: (JSON types) -> the
    arguments of all ranks. context: of autocast."""

    model: Any
    prepare: Callable[[dict[str, Any]], dict[str, Any]]
    gather: Callable[[Any], list[Any]]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def check_rows(runs: Runs, make: Callable[[], Iterable[Any]]) -> str | None:
    """Why flat rows are wrong for the model, the same on all ranks; None if they are right. Collective.

    make: returns the fields of a `Trial`. If it fails on a rank, no rank runs the model, whose wrapper may wait for all
    ranks.
    """
    trials: list[Trial] = []

    def first_reason(run: Callable[[], str | None]) -> str | None:
        """The result of the first rank that has a reason."""
        try:
            why = run()
        except LayoutError as error:
            why = error.reason
        except Exception as error:
            why = f"the check of the layout could not be made: {one_line(error).rstrip('.')}"
        answers = runs.gather(why)
        reasons = (f"{why} (rank {rank})" if len(answers) > 1 else why for rank, why in enumerate(answers) if why)
        return next(reasons, None)

    def make_trial() -> None:
        trial = Trial(*make())
        if not trial.alone:
            trial = of_flat_batch(trial.flat, trial.segments[: len(trial.ids)], trial.ids)
        for number, rows in enumerate(zip(*_by_row(trial, lambda batch, _: batch["input_ids"]))):
            if not all(torch.equal(row, rows[0]) for row in rows):
                raise LayoutError(
                    f"the collator sorts or changes its rows: row {trial.ids[number % len(trial.ids)]} has other "
                    "tokens in a batch than alone"
                )
        trials.append(trial)

    if (why := first_reason(make_trial)) is not None:
        return why
    maker, (trial,) = _makes_positions(runs.model), trials
    if maker is not None and trial.flat["position_ids"].dim() != 3:  # few samples may show no difference
        return (  # the same on all ranks
            f"the collator makes no position_ids, and {type(maker).__name__} makes positions of images from padded "
            "rows only (a collator can call its get_rope_index, as LLaMA-Factory's does)"
        )
    return first_reason(lambda: _why_different(runs, trial))


def _makes_positions(model: Any) -> Any:
    return next((part for part in unwrapped(model).modules() if hasattr(part, "get_rope_index")), None)


def positions_of_media(model: Any) -> Callable[[Mapping[str, Any]], Tensor] | None:
    """A function that computes the positions of a padded batch with images as the model does, [3, rows, length].

    None if the model computes no such positions, or needs more than arguments of its forward.
    """
    maker = _makes_positions(model)
    if maker is None:
        return None
    takes = inspect.signature(maker.get_rope_index).parameters.keys() - {"kwargs"}
    if not takes <= inspect.signature(maker.forward).parameters.keys():
        return None
    return functools.partial(_rotary_positions, maker.get_rope_index, takes)


def _rotary_positions(get_rope_index: Callable[..., Any], takes: set[str], batch: Mapping[str, Any]) -> Tensor:
    arguments = {name: value for name, value in batch.items() if name in takes}
    if "mm_token_type_ids" in takes:  # without it the model takes all tokens as text
        arguments.setdefault("mm_token_type_ids", torch.zeros_like(batch["input_ids"]))
    try:
        positions: Tensor = get_rope_index(**arguments)[0]
    except Exception as error:
        raise LayoutError(f"get_rope_index of the model fails: {one_line(error)}") from error
    return positions


def _why_different(runs: Runs, trial: Trial) -> str | None:
    door = WithoutLogits(runs.model)

    def losses_of(batch: Mapping[str, Any], segments: tuple[int, ...]) -> Tensor:
        return _token_losses(runs.model, door, runs.prepare(dict(batch)), segments)

    with _evaluating(runs.model) as dtypes, runs.context():
        alone, padded, flat = _losses(trial, losses_of)
    if door.reason is not None and not trial.has_logits:
        raise DataError(door.reason)
    rows = f"rows {', '.join(map(str, dict.fromkeys(trial.ids)))}" if trial.ids else "the first samples"
    loss, of_padded, of_flat = _largest(alone), _largest(padded - alone), _largest(flat - alone)
    if not math.isfinite(loss):
        return (
            f"the model's loss of {rows} is {loss}, each alone in a plain batch: its weights or inputs are damaged, "
            "so the layouts cannot be compared"
        )
    eps = max(torch.finfo(dtype).eps for dtype in dtypes | {torch.float32})  # norms and softmax compute in float32
    if of_flat <= max(TIMES_ROUNDING * of_padded, LEAST_EPS * eps * max(loss, 1.0)):
        return None
    return (  # also if it is not a number
        f"the model computes something else on a flat row: token losses of {rows} differ by {of_flat:.1e} from each "
        f"alone, padded by {of_padded:.1e}"
    )


def _token_losses(
    model: Callable[..., Any], door: WithoutLogits | None, inputs: dict[str, Any], segments: Sequence[int]
) -> Tensor:
    """[rows, length]: the loss of each token, supervised or not, predicted by the token before it; or the score of each
    token, if the model returns scores. inputs: of the model. door: avoids logits, if it can be used."""
    ids = inputs["input_ids"]

    def run() -> Any:
        with flat_row(segments):
            return model(**inputs)

    if door is not None and door.reason is None:
        _, places, log_probs, _ = door.log_probs(run, ids)
        return log_probs.new_zeros(ids.numel()).index_copy(0, places + 1, -log_probs).view(ids.shape)
    outputs = run()
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape:
        raise DataError("the model does not return logits of all tokens, by which the layouts are compared")
    rows = (row if row.dtype == torch.float64 else row.float() for row in logits)
    if logits.shape[-1] == 1:
        return torch.stack([row[:, 0] for row in rows])
    losses = [functional.cross_entropy(row[:-1], labels[1:], reduction="none") for row, labels in zip(rows, ids)]
    return functional.pad(torch.stack(losses), (1, 0))


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[set[torch.dtype]]:
    """Within it the model runs without gradients, dropout and checkpoints. Yields the dtypes that modules return, set
    by weights, autocast, accelerate or FSDP."""
    dtypes: set[torch.dtype] = set()

    def look(_: Any, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            dtypes.add(output.dtype)

    before = [(module, module.training) for module in model.modules()]
    for module, _ in before:
        module.training = False
    hook = register_module_forward_hook(look)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # in eval mode nothing draws on the device
            yield dtypes
    finally:
        hook.remove()
        for module, training in before:
            module.training = training
