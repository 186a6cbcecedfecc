"""Padded rows of a trainer that the model computes as one flat row: preferences, examples of KTO, rewards; and `unpad`
for custom loops.

A preference loss reads two numbers from the logits [rows, length, vocabulary] of a token: the log-probability of the
label and, for its log, the mean of the logits. Here a forward computes them for the supervised tokens of one flat row,
a chunk at a time, and returns a tensor [rows, length, 2] that acts as logits (`LabelLogProbs`). A reward is computed
from the last hidden states, without logits, or the model returns a score of each token as its logits.

Names of shapes: see `head`.
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

    inputs: replace inputs of the model (None: removed). labels: [1, total], the first label of each row is -100. index:
    int64[tokens], places of the flat row's first tokens in the padded rows laid end to end; the tokens after them (a
    dummy image, filler) are in no row. num_supervised: number of labels other than -100. segments: see `flat_row`.
    """

    inputs: Mapping[str, Any]
    labels: Tensor
    index: Tensor
    num_supervised: int
    segments: Sequence[int]


class UnpadDoor:
    """Lets a transformers model compute forwards of padded rows as one flat row, without logits.

    model: also wrapped by PEFT, a reward head, DDP, FSDP or DeepSpeed. reads: what the trainer reads from the output:
    log-probabilities of "labels", the last "hidden states" (a reward head), or "scores" returned as logits. reason: why
    the door cannot be used; None if it can. A backward that recomputes forwards must run within `flat_row`, too.

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
        """Within it every forward of the model computes these rows instead of its own."""
        with forward_replaced(self._door.model, functools.partial(self._forward, rows)):
            yield

    def _forward(self, rows: FlatRows, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None or len(args) > 1:
            raise DataError("layout: flat rows need a model call with `input_ids` and all other arguments by name")
        arguments = {name: value for name, value in {**kwargs, **rows.inputs}.items() if name not in _NOT_GIVEN}
        with flat_row(rows.segments):
            if self._reads == "scores":
                output = own(**arguments)
                values: dict[str, Any] = {"logits": _in_rows(output["logits"], rows, ids.shape)}
            elif self._reads == "hidden states":
                run = functools.partial(own, **arguments, output_hidden_states=True)
                output, _ = self._door.at_head(run, lambda _, hidden: hidden.new_zeros(()))
                values = {"hidden_states": (_in_rows(output["hidden_states"][-1], rows, ids.shape),)}
            elif kwargs.get("fused_lm_head"):  # of trl: figures of the labels, [1, total - 1]
                output, shape = own(**arguments, labels=rows.labels), (1, rows.labels.numel() - 1)
                per_label = {name: value for name, value in output.items() if value.shape == shape}
                values = {
                    name: _in_rows(nn.functional.pad(value, (0, 1))[..., None], rows, ids.shape)[:, :-1, 0]
                    for name, value in per_label.items()
                }
            else:
                run = functools.partial(own, **arguments)
                output, places, *of_labels = self._door.log_probs(run, rows.labels, rows.num_supervised)
                pairs = torch.stack(of_labels, -1)  # [supervised, 2]: log-probability, mean of logits
                missing = pairs.new_tensor((0.0, torch.nan))
                row = missing.expand(rows.labels.numel(), 2).index_copy(0, places, pairs)[None]
                values = {"logits": _in_rows(row, rows, ids.shape, missing).as_subclass(LabelLogProbs)}
        return type(output)(**{name: value for name, value in output.items() if name != "loss"} | values)


def _in_rows(values: Tensor, rows: FlatRows, shape: torch.Size, missing: Tensor | None = None) -> Tensor:
    """[1, total, size] -> [*shape, size], with `missing`, or 0, at places without a token."""
    if values.shape[:-1] != rows.labels.shape:
        raise DataError(f"layout: the model returns {list(values.shape[:-1])} for {list(rows.labels.shape)} tokens")
    missing = values.new_zeros(values.shape[-1]) if missing is None else missing
    padded = missing.expand(shape.numel(), -1).index_copy(0, rows.index, values[0, : len(rows.index)])
    return padded.view(*shape, -1)


_NOT_GIVEN = ("labels", "logits_to_keep", "output_hidden_states")
"""Arguments of a padded forward that the flat one does not get."""


def positions_of_samples(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within it a forward of the flat row in progress gets `position_ids` that restart at each sample, if it has none.

    model: a transformers model; some trainers call a reference model with token ids only.
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
"""Functions that select from a tensor, convert it, or read its properties."""


class LabelLogProbs(Tensor):
    """Replaces logits by [rows, length, 2]: at each position the log-probability of the next label (0 if there is none)
    and the mean of the logits over the vocabulary (NaN if there is no label).

    These act as logits whose `logsumexp` is 0: `gather` of the labels, also after `log_softmax`, returns
    log-probabilities, and `cross_entropy` without reduction their negatives. `mean` and `nansum` use the means.
    Functions that select or convert are torch's. All others raise `TypeError`, because they need the logits.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", str(function)), kwargs or {}
        if name in _SELECTING:
            return super().__torch_function__(function, types, args, kwargs)
        if name == "log_softmax":
            return args[0]
        if name == "__iter__":  # torch's returns rows of another class
            return iter(args[0].unbind())
        with torch._C.DisableTorchFunctionSubclass():
            if name == "gather":
                return args[0].as_subclass(Tensor)[..., :1]
            if name == "logsumexp":
                return torch.zeros_like(args[0].as_subclass(Tensor)[..., 0])
            if name == "cross_entropy" and kwargs.get("reduction") == "none" and not kwargs.get("label_smoothing"):
                return (-args[0].as_subclass(Tensor)[..., 0]).masked_fill(args[1] == kwargs["ignore_index"], 0.0)
            if name in ("mean", "nansum"):
                means = args[0].detach().as_subclass(Tensor)[..., 1]
                if (*args[1:], kwargs.get("dim"))[0] == -1:
                    return means
                return means.nanmean() if name == "mean" else means.nansum()
        raise TypeError(
            f"{name} needs logits, and the layout is flat, which has only log-probabilities of labels; set `layout: "
            "padded` in the odb block."
        )


# The model of a custom loop computes flat micro-batches (I10).


def unpad(model: nn.Module, dataloader: Any) -> Callable[[], None]:
    """Let a model of transformers compute flat micro-batches, and check it on a few rows. Call before the first batch.

    Attention and recurrent layers then separate samples by the lengths in the last step info: call
    `pop_step_info(batch)` right before the forward of that batch. The model computes all other inputs as before: in
    eval mode, with an `attention_mask`, of several rows. The cache of keys and values is switched off, because
    transformers does not look for samples in a row if there is a cache.

    model: as the loop calls it, wrapped or not, on the device of the training. dataloader: an `ODBDataLoader` (or a
    DataLoader after `apply_odb`) with `layout="flat"`, not yet iterated; its epoch begins here. All ranks call it.
    Returns a function that restores the model. A model may be set up for several dataloaders.
    Raises `ConfigError` on all ranks if the losses of tokens depend on other samples of their row.

    Example::

        with ODBDataLoader(dataset, token_budget=8192, layout="flat", collate_fn=collate) as loader:
            unpad(model, loader)
            for batch in loader:
                info = pop_step_info(batch)
                (model(**batch).loss * info.loss_scale).backward()
    """
    online = getattr(dataloader, "_odb", None)
    if online is None or online.config.layout != "flat":
        raise ConfigError("unpad: pass the ODBDataLoader that the loop iterates, made with layout='flat'.")
    if not online.loader.has_rows:
        raise ConfigError(
            "unpad: the rows of a stream cannot be read by number; call unpad with a loader of a small dataset of such "
            "rows first, and keep the model as it returns."
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
    undo: Callable[[], None] = vars(inner)[UNDO]
    return undo


UNDO = "_odb_undo"
"""The attribute of a set-up model that restores it. It consists of data, so a model can be copied and pickled with
it."""


class _LoopDoor:
    """The forward of a model in a custom loop, in which `pop_step_info` begins the row of a batch."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._computed: int | None = None  # number of the last row that the model computed

    def forward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = args[1:] if args and args[0] is self._model else args  # accelerate binds the forward when it unwraps it
        row = row_in_progress()
        positions: Any = kwargs.get("position_ids")
        is_flat = isinstance(positions, Tensor) and positions.dim() > 1 and positions.shape[-2] == 1
        if not is_flat or kwargs.get("attention_mask") is not None:
            row = None
        elif row is None or not self._are_of(positions, row):
            if self._model.training:
                in_progress = "of no flat row" if row is None else f"of another row, of {row.tokens} tokens"
                raise ConfigError(
                    f"unpad: {type(self._model).__name__} is given a row of {positions.shape[-1]} tokens, and the last "
                    f"step info is {in_progress}; call pop_step_info(batch) right before its forward."
                )
            row = None
        with flat_row(()) if row is None else contextlib.nullcontext():
            output = own(*args, **kwargs)
        if not torch.compiler.is_compiling():
            row_of_backward(output, row)
        return output

    def _are_of(self, positions: Tensor, row: FlatRow) -> bool:
        """Whether these are the positions of the row in progress. Reading them makes the host wait for the device, so
        they are read only in eval mode, or after several `pop_step_info` without a forward between them."""
        is_next = self._model.training and self._computed is not None and row.number <= self._computed + 1
        if positions.shape[-1] != row.tokens:
            return False
        if not is_next and not torch.equal(positions.flatten(0, -2)[0].cpu(), positions_of(row.segments)):
            return False
        self._computed = row.number
        return True
