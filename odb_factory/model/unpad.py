"""Padded rows that a trainer reads, computed by its model as one flat row: preferences, examples of KTO, rewards.

A preference loss reads from logits [rows, length, vocabulary] the log-probability of each label, and for its log the
mean of the logits. Here a forward computes these for the supervised tokens of one flat row, some hundred at a time, and
hands over a tensor [rows, length, 2] that answers what the loss asks of logits (`LabelLogProbs`). A reward is computed
from the last hidden states, and no logits, or is what the model returns for logits: a score of each token.

Names of shapes: as in `head`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from odb_factory.errors import ConfigError, DataError, LayoutError
from odb_factory.log import get_logger
from odb_factory.model.check import NUM_SAMPLES, Runs, check_rows, resolve_layout, unwrapped
from odb_factory.model.flat_row import (
    FlatRow,
    call_all,
    copy_to,
    flat_row,
    forward_replaced,
    positions_of,
    replace_forward,
    row_in_progress,
    row_of_backward,
)
from odb_factory.model.head import WithoutLogits

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FlatRows:
    """The rows of a batch as one row.

    inputs: replace those of the model (None: it gets none). labels: [1, total], the first of each row -100. index:
    int64[tokens], the places of the row's first tokens in the rows laid end to end; the tokens after them (a dummy
    image, filler) are in no row. num_supervised: labels that are not -100. segments: of `flat_row`.
    """

    inputs: Mapping[str, Any]
    labels: Tensor
    index: Tensor
    num_supervised: int
    segments: Sequence[int]


class UnpadDoor:
    """Lets a transformers model compute forwards of padded rows as one flat row without logits.

    model: also wrapped by PEFT, a reward head, DDP, FSDP or DeepSpeed. reads: what is read of it: log-probabilities of
    "labels", "hidden states" (the last ones, by a reward head; nobody reads logits), or the "scores" that it returns
    for logits. reason: why the door cannot act; None if it can. A backward that recomputes forwards runs within
    `flat_row`, too.

    Example::

        door = UnpadDoor(model)
        with flat_row(rows.segments), door.flat(rows):
            logits = model(input_ids=ids, attention_mask=mask).logits  # [rows, length, 2], see `LabelLogProbs`
            (logits.log_softmax(-1).gather(2, labels.unsqueeze(2)) * weights).sum().backward()
    """

    def __init__(self, model: nn.Module, *, reads: Literal["labels", "hidden states", "scores"] = "labels"):
        self._door = WithoutLogits(model)
        self._reads = reads

    @property
    def reason(self) -> str | None:
        return None if self._reads == "scores" else self._door.reason

    @contextlib.contextmanager
    def flat(self, rows: FlatRows) -> Iterator[None]:
        """Within it every forward of the model computes these rows, whatever rows it is given."""
        with self._door.replacing_forward(functools.partial(self._forward, rows)):
            yield

    def _forward(self, rows: FlatRows, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None or len(args) > 1:
            raise DataError("layout: rows can be laid flat only if the model is given `input_ids`, the rest by name")
        shape = ids.shape
        arguments = {name: value for name, value in {**kwargs, **rows.inputs}.items() if name not in _NOT_GIVEN}
        with flat_row(rows.segments):
            if self._reads == "scores":
                output = own(**arguments)
                values: dict[str, Any] = {"logits": _in_rows(output["logits"], rows, shape)}
            elif self._reads == "hidden states":  # the last ones, and no logits
                with self._door.head_computes(lambda _, hidden: hidden.new_zeros(1, 1, 1)):
                    output = own(**arguments, output_hidden_states=True)
                values = {"hidden_states": (_in_rows(output["hidden_states"][-1], rows, shape),)}
            else:
                run = functools.partial(own, **arguments)
                output, places, *of_labels = self._door.log_probs(run, rows.labels, rows.num_supervised)
                pairs = torch.stack(of_labels, -1)  # [supervised, 2]: log-probability, mean of logits
                missing = pairs.new_tensor((0.0, torch.nan))
                row = missing.expand(rows.labels.numel(), 2).index_copy(0, places, pairs)[None]
                values = {"logits": _in_rows(row, rows, shape, missing).as_subclass(LabelLogProbs)}
        return type(output)(**{name: value for name, value in output.items() if name != "loss"} | values)


def _in_rows(values: Tensor, rows: FlatRows, shape: torch.Size, missing: Tensor | None = None) -> Tensor:
    """[1, total, size] -> [*shape, size]: `missing`, or 0, if there is no token."""
    if values.shape[:-1] != rows.labels.shape:
        raise DataError(f"layout: the model returns {list(values.shape[:-1])} for {list(rows.labels.shape)} tokens")
    missing = values.new_zeros(values.shape[-1]) if missing is None else missing
    padded = missing.expand(shape.numel(), -1).index_copy(0, rows.index, values[0, : len(rows.index)])
    return padded.view(*shape, -1)


_NOT_GIVEN = ("labels", "logits_to_keep", "output_hidden_states")
"""Arguments of a forward of rows that the one of a flat row does not get."""


def positions_of_samples(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Meanwhile a forward of the flat row in progress without `position_ids` gets those of its samples, each from 0.

    model: a transformers model; a trainer may hand a reference model nothing but token ids.
    """

    def with_positions(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        row, ids = row_in_progress(), kwargs.get("input_ids")
        if row is not None and ids is not None and kwargs.get("position_ids") is None and ids.shape == (1, row.tokens):
            kwargs["position_ids"] = copy_to(positions_of(row.segments)[None], ids.device)
        return own(*args, **kwargs)

    return forward_replaced(model, with_positions)


_SELECTING = {
    "__get__", "__getitem__", "__len__", "__repr__", "chunk", "clone", "contiguous", "cpu", "detach", "dim", "float",
    "is_floating_point", "numel", "register_hook", "requires_grad_", "size", "split", "to", "unbind", "view",
}  # fmt: skip
"""Functions that select from a tensor, convert it, or look at it."""


class LabelLogProbs(Tensor):
    """[rows, length, 2] in the place of logits: of each position the log-probability of the label behind it (0 if
    there is none), and the mean over the vocabulary of its logits (NaN if there is no label).

    It is logits whose `logsumexp` is 0: `gather` of the labels, also after `log_softmax`, gives log-probabilities, and
    `cross_entropy` without reduction their negatives. `mean` and `nansum` are those of the means. Functions that select
    or convert work as ever, and everything else raises `TypeError`: it would need the logits.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", str(function)), kwargs or {}
        if name == "log_softmax":
            return args[0]
        if name == "gather":
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(Tensor)[..., :1]
        if name == "cross_entropy" and kwargs.get("reduction") == "none" and not kwargs.get("label_smoothing"):
            with torch._C.DisableTorchFunctionSubclass():
                return (-args[0].as_subclass(Tensor)[..., 0]).masked_fill(args[1] == kwargs["ignore_index"], 0.0)
        if name == "logsumexp":
            return torch.zeros(args[0].shape[:-1], dtype=args[0].dtype, device=args[0].device)
        if name == "__iter__":  # torch's would give rows that are not `LabelLogProbs`
            return iter(args[0].unbind())
        if name in ("mean", "nansum"):
            with torch._C.DisableTorchFunctionSubclass():
                means = args[0].detach().as_subclass(Tensor)[..., 1]
                if (*args[1:], kwargs.get("dim"))[0] == -1:
                    return means
                return means.nanmean() if name == "mean" else means.nansum()
        if name in _SELECTING:
            return super().__torch_function__(function, types, args, kwargs)
        raise TypeError(
            f"{name} needs logits, and the layout is flat: there are log-probabilities of labels only; set `layout: "
            "padded` in the odb block."
        )


# ----------------------------------------------------------------------------------------------------------------------
# `unpad`: the model of any loop computes flat micro-batches (I10).


def unpad(model: nn.Module, dataloader: Any) -> Callable[[], None]:
    """Let a model of transformers compute flat micro-batches, and check it on a few rows; before the first batch.

    Its attention and its recurrent layers then keep samples apart by the lengths in the step info that was taken out
    last: call `pop_step_info(batch)` right before the forward of that batch. Everything else that the model is given is
    computed as before: in eval mode, with an `attention_mask`, of several rows. Its cache of keys and values is
    switched off, because transformers does not look for samples in a row beside it.

    model: as the loop calls it, wrapped or not, where it will be trained. dataloader: an `ODBDataLoader` (or what
    `apply_odb` has changed) with `layout="flat"`, not yet iterated. It begins the epoch. With several ranks, all call
    it. Returns a function that puts the model back as it was. A model may be set up for several dataloaders.
    Raises `ConfigError` on all ranks if the losses of tokens depend on the other samples of their row.

    Example::

        with ODBDataLoader(dataset, token_budget=8192, layout="flat", collate_fn=collate) as loader:
            unpad(model, loader)
            for batch in loader:
                info = pop_step_info(batch)
                (model(**batch).loss * info.loss_scale).backward()
    """
    online = getattr(dataloader, "_odb", None)
    if online is None or online.config.layout != "flat":
        raise ConfigError("unpad: give the ODBDataLoader that the loop iterates, made with layout='flat'.")
    if not online.loader.has_rows:
        raise ConfigError(
            "unpad: the rows of a stream cannot be read by their number; try the model with a dataset of a few such "
            "rows first, and let its `unpad` stand."
        )
    inner, device = unwrapped(model), next(model.parameters()).device
    is_first = UNDO not in vars(inner)
    if is_first:
        layout = resolve_layout([inner], "flat", SimpleNamespace(device=device, bf16=False, fp16=False))
        leave = replace_forward(inner, _LoopDoor(inner).forward)
        vars(inner)[UNDO] = functools.partial(call_all, [layout.undo, leave, functools.partial(delattr, inner, UNDO)])
        logger.info("layout: %s (%s)", layout.name, layout.reason)

    def to_device(batch: dict[str, Any]) -> dict[str, Any]:
        return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}

    online.loader.begin()
    why = check_rows(Runs(model, to_device, online.gather), lambda: online.trial_batches(NUM_SAMPLES))
    if why is not None:
        if is_first:
            vars(inner)[UNDO]()
        raise LayoutError(why)
    online.is_checked = True
    puts_back: Callable[[], None] = vars(inner)[UNDO]
    return puts_back


UNDO = "_odb_undo"
"""The attribute of a model that is set up which puts it back: of data alone, so that copies of the model have their own
and a model can be pickled."""


class _LoopDoor:
    """The forward of a model in a loop, where `pop_step_info` begins the row of a batch."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._computed: int | None = None  # the number of the last row that the model has computed

    def forward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = args[1:] if args and args[0] is self._model else args  # accelerate binds the forward that it unwraps
        row = row_in_progress()
        positions: Any = kwargs.get("position_ids")
        is_flat = isinstance(positions, Tensor) and positions.dim() > 1 and positions.shape[-2] == 1
        if not is_flat or kwargs.get("attention_mask") is not None:
            row = None
        elif row is None or not self._is_of(positions, row):
            if self._model.training:
                in_progress = "of no flat row" if row is None else f"of another row, of {row.tokens}"
                raise ConfigError(
                    f"unpad: {type(self._model).__name__} is given a row of {positions.shape[-1]} tokens, and the step "
                    f"info taken out last is {in_progress}; call pop_step_info(batch) right before its forward."
                )
            row = None
        with flat_row(()) if row is None else contextlib.nullcontext():
            output = own(*args, **kwargs)
        if not torch.compiler.is_compiling():
            row_of_backward(output, row)
        return output

    def _is_of(self, positions: Tensor, row: FlatRow) -> bool:
        """Whether these are the positions of the row in progress. Reading them makes the host wait for the device, so
        they are read only in evaluations and if infos of several batches were taken out since the last forward."""
        if positions.shape[-1] != row.tokens:
            return False
        is_next = self._computed is not None and row.number <= self._computed + 1
        if not (self._model.training and is_next) and not torch.equal(
            positions.flatten(0, -2)[0].cpu(), positions_of(row.segments)
        ):
            return False
        self._computed = row.number
        return True
