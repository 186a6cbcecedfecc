"""Padded rows that a trainer reads, computed by its model as one flat row: preferences, examples of KTO, rewards.

A preference loss reads from logits [rows, length, vocabulary] the log-probability of each label, and for its log the
mean of the logits. Here a forward computes these for the supervised tokens of one flat row, some hundred at a time, and
hands over a tensor [rows, length, 2] that answers what the loss asks of logits (`LabelLogProbs`). A reward is computed
from the last hidden states: where a forward is asked for hidden states, it hands over these, and no logits.

Names of shapes: as in `head`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from odb_factory.errors import DataError
from odb_factory.model.chunked import log_probs_of
from odb_factory.model.flat_row import copy_to, flat_row, row_in_progress
from odb_factory.model.head import WithoutLogits, forward_replaced


@dataclass(frozen=True, slots=True)
class FlatRows:
    """The rows of a batch as one row. inputs: in the place of those of the model (None: it gets none). labels: [1,
    total], the first of each row -100. index: int64[tokens], where each of the first tokens of the row stands in the
    rows laid end to end; what comes behind them is in no row. num_supervised: labels that are not -100. segments: of
    `flat_row`."""

    inputs: Mapping[str, Any]
    labels: Tensor
    index: Tensor
    num_supervised: int
    segments: Sequence[int]


class UnpadDoor:
    """Forwards of padded rows by a transformers model as those of one flat row without logits.

    model: also wrapped by PEFT, a reward head, DDP, FSDP or DeepSpeed. reason: why it cannot be; None where it can. The
    first forward may find one, and then raises. A backward that runs forwards again is within `flat_row`.

    Example::

        door = UnpadDoor(model)
        with flat_row(rows.segments), door.flat(rows):
            logits = model(input_ids=ids, attention_mask=mask).logits  # [rows, length, 2], see `LabelLogProbs`
            (logits.log_softmax(-1).gather(2, labels.unsqueeze(2)) * weights).sum().backward()
    """

    def __init__(self, model: nn.Module):
        self._door = WithoutLogits(model)

    @property
    def reason(self) -> str | None:
        return self._door.reason

    @contextlib.contextmanager
    def flat(self, rows: FlatRows) -> Iterator[None]:
        """Within it every forward of the model is one of these rows, whichever of its rows' arguments it is given."""
        with self._door.replacing_forward(functools.partial(self._forward, rows)):
            yield

    def _forward(self, rows: FlatRows, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args or "input_ids" not in kwargs:
            raise DataError("layout: rows can be laid flat only where the model is given `input_ids` by name")
        shape = kwargs["input_ids"].shape
        given = {name: value for name, value in {**kwargs, **rows.inputs}.items() if name != "labels"}
        with flat_row(rows.segments):
            if given.get("output_hidden_states"):
                return self._hidden_states(rows, functools.partial(own, **given), shape)
            return self._log_probs(rows, functools.partial(own, **given), shape)

    def _hidden_states(self, rows: FlatRows, run: Callable[[], Any], shape: torch.Size) -> Any:
        """The last ones, [rows, length, hidden]: 0 where there is no token."""
        with self._door.head_computes(lambda _, hidden: hidden.new_zeros(1, 1, 1)):
            output = run()
        last = output["hidden_states"][-1]
        if last.shape[:-1] != rows.labels.shape:
            raise _other_shape(last, rows)
        padded = last.new_zeros(shape.numel(), last.shape[-1]).index_copy(0, rows.index, last[0, : len(rows.index)])
        rest = {name: value for name, value in output.items() if name not in ("loss", "hidden_states")}
        return type(output)(hidden_states=(padded.view(*shape, -1),), **rest)

    def _log_probs(self, rows: FlatRows, run: Callable[[], Any], shape: torch.Size) -> Any:
        after = self._door.after_head(run, rows.labels)
        found: list[Tensor] = []

        def log_probs(linear: nn.Linear, hidden: Tensor) -> Tensor:
            if hidden.shape[:-1] != rows.labels.shape:
                raise _other_shape(hidden, rows)
            places, of_labels, means = log_probs_of(linear, hidden, rows.labels, rows.num_supervised, after)
            found.extend((places, means))
            return of_labels.reshape(1, -1, 1)

        with self._door.head_computes(log_probs) as outputs:
            output = run()
        places, means = found
        # [supervised] -> [total] -> [rows, length]
        values = torch.stack((outputs[0].reshape(-1), means), -1)
        missing = values.new_tensor((0.0, torch.nan))
        in_row = missing.expand(rows.labels.numel(), 2).index_copy(0, places, values)[: len(rows.index)]
        padded = missing.expand(shape.numel(), 2).index_copy(0, rows.index, in_row)
        rest = {name: value for name, value in output.items() if name not in ("loss", "logits")}
        return type(output)(logits=padded.view(*shape, 2).as_subclass(LabelLogProbs), **rest)


def positions_of_samples(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Meanwhile a forward of the flat row under way that is given no `position_ids` takes those of its samples, each
    from 0: of a reference model that a trainer hands nothing but token ids. model: a transformers model."""
    return forward_replaced(model, _with_positions)


def _with_positions(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    row, ids = row_in_progress(), kwargs.get("input_ids")
    if row is not None and ids is not None and kwargs.get("position_ids") is None and ids.shape == (1, row.tokens):
        kwargs["position_ids"] = copy_to(row.positions()[None], ids.device)
    return own(*args, **kwargs)


def _other_shape(hidden: Tensor, rows: FlatRows) -> DataError:
    return DataError(f"layout: {list(hidden.shape[:-1])} hidden states of {list(rows.labels.shape)} tokens")


_SELECTING = {
    "__get__", "__getitem__", "__len__", "__repr__", "chunk", "clone", "contiguous", "cpu", "detach", "dim", "float",
    "is_floating_point", "numel", "register_hook", "requires_grad_", "size", "split", "to",
}  # fmt: skip
"""Functions that select from a tensor, convert it, or look at it."""


class LabelLogProbs(Tensor):
    """[rows, length, 2] in the place of logits: of each position the log-probability of the label behind it (0 where
    there is none), and the mean over the vocabulary of its logits (NaN where there is no label).

    `log_softmax` followed by `gather` of the labels gives the former, `mean` and `nansum` work on the latter. What
    selects or converts works as ever, and everything else raises `TypeError`: it would need the logits.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", str(function)), kwargs or {}
        if name == "log_softmax":
            return args[0]
        if name == "gather":
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(Tensor)[..., :1]
        if name in ("mean", "nansum"):
            with torch._C.DisableTorchFunctionSubclass():
                means = args[0].detach().as_subclass(Tensor)[..., 1]
                return means.nanmean() if name == "mean" else means.nansum()
        if name in _SELECTING:
            return super().__torch_function__(function, types, args, kwargs)
        raise TypeError(
            f"{name} needs logits, and the layout is flat: there are log-probabilities of labels only; set `layout: "
            "padded` in the odb block."
        )
