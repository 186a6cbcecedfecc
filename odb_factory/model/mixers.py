"""Token mixers that carry state along the row (Gated DeltaNet, Mamba, short convolutions), inside a flat row.

On a flat row, an unmodified mixer carries state from one sample into the next. `install` replaces the forward of each
mixer listed in `KNOWN`: inside `flat_row`, the new forward unpacks the hidden states [1, tokens, width] into
right-padded rows [samples, longest, width], runs the mixer without cache or mask (mixers are causal, so padding to the
right of a sample does not affect the sample), and packs the result. The rest of the model stays flat. If no flat row is
in progress (evaluation, generation), the original forward runs. A mixer missing from `KNOWN` leaks state between
samples; the layout check (`model/check.py`) detects the leak.

Samples of similar length form a group, and the mixer runs once per group. The padding of a group is at most the
larger of `WASTE` of its tokens and `SMALL` positions, so a mixer computes at most 1.25 x tokens + 256 x groups
positions of any row. The number of groups grows with the logarithm of longest / shortest. Under ZeRO-3, all ranks must
call a mixer equally often, so the number of groups is fixed (`EQUAL_GROUPS`).

    undo = install(model)
    with flat_row((5, 3)):
        model(input_ids=ids, position_ids=positions).loss.backward()  # ids: [1, 8]
    undo()
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from odb_factory.errors import LayoutError
from odb_factory.model.flat_row import call_all, copy_to, replace_forward, row_in_progress

KNOWN = (
    "GatedDeltaNet", "MambaMixer", "Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "MambaLayer", "ShortConv",
    "RecurrentBlock", "LightningAttention", "RwkvBlock", "xLSTMBlock",
)  # fmt: skip
"""Suffixes of the class names of mixers that `install` covers; the model family is the prefix. RWKV and xLSTM are
listed as whole blocks because all parts of their blocks carry state."""
WASTE, SMALL = 0.25, 256
"""Maximum padding of a group: the larger of this fraction of its tokens and this many positions, which cost less than
another call."""
EQUAL_GROUPS = 4
"""Number of groups per row if all ranks must call a mixer equally often."""


class PaddedGroups:
    """The samples of a flat row, grouped by similar length; each group is a block of right-padded rows.

    segments: lengths of the samples in the row, in order. number: fixed number of groups, which then have equal numbers
    of samples (None: `WASTE` and `SMALL` determine the groups); a group without samples is one empty position.
    shapes: (rows, longest) of each group. positions: total positions of all groups, including padding.
    """

    def __init__(self, segments: Sequence[int], number: int | None = None):
        order = sorted(range(len(segments)), key=lambda sample: -segments[sample])
        ends = [len(order) * group // (number or 1) for group in range((number or 0) + 1)]
        groups = [order[start:end] for start, end in itertools.pairwise(ends)]
        tokens = 0  # in the last group
        for sample in order if number is None else ():
            tokens += segments[sample]
            if groups and (len(groups[-1]) + 1) * segments[groups[-1][0]] - tokens <= max(WASTE * tokens, SMALL):
                groups[-1].append(sample)
            else:
                groups.append([sample])
                tokens = segments[sample]
        self.shapes = [(len(group), segments[group[0]]) if group else (1, 1) for group in groups]
        starts, self.positions = [0] * len(segments), 0
        for group, (rows, longest) in zip(groups, self.shapes):
            for row, sample in enumerate(group):
                starts[sample] = self.positions + row * longest
            self.positions += rows * longest
        self._places = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, segments)])
        self._on_device: dict[torch.device, Tensor] = {}

    def places(self, device: torch.device) -> Tensor:
        """int64[tokens]: the index of each token of the row in the concatenated positions of all groups."""
        if device not in self._on_device:
            self._on_device[device] = copy_to(self._places, device)
        return self._on_device[device]

    def unpack(self, row: Tensor) -> list[Tensor]:
        """[1, tokens, ...] -> one [rows, longest, ...] per group, with zeros to the right of each sample."""
        states = row[0]
        padded = states.new_zeros(self.positions, *states.shape[1:])
        padded = padded.index_copy(0, self.places(row.device), states)
        parts = padded.split([rows * longest for rows, longest in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes)]

    def pack(self, groups: Sequence[Tensor]) -> Tensor:
        """The inverse of `unpack`."""
        padded = torch.cat([group.flatten(0, 1) for group in groups])
        return padded.index_select(0, self.places(padded.device))[None]


def find(model: nn.Module) -> list[nn.Module]:
    """The mixers of `model` that `install` covers."""
    return [part for part in model.modules() if type(part).__name__.endswith(KNOWN)]


def install(model: nn.Module) -> Callable[[], None]:
    """Make the mixers of `model` run on padded groups inside a flat row; returns a function that undoes the change."""
    undo = []
    for mixer in find(model):
        if getattr(mixer.forward, "func", None) is not _mix:  # skip mixers that are already patched
            undo.append(replace_forward(mixer, functools.partial(_mix, mixer)))
    return functools.partial(call_all, undo)


@torch.compiler.disable(recursive=False)
def _mix(mixer: nn.Module, own: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The replaced forward of a mixer. own: the forward before `install`.

    Inside a flat row, `own` gets the hidden states and every other tensor with one entry per token; no cache, no mask.
    """
    row = row_in_progress()
    if row is None:
        return own(*args, **kwargs)
    signature = inspect.signature(MethodType(type(mixer).forward, mixer))
    arguments = signature.bind(*args, **kwargs).arguments
    states: Tensor = next(iter(arguments.values()))
    if states.shape[:2] != (1, row.tokens):
        raise LayoutError(
            f"{type(mixer).__name__} gets hidden states {list(states.shape)}, which are not the flat row of "
            f"{row.tokens} tokens in progress (prompt or prefix tuning adds tokens)"
        )
    gathers = hasattr(next(mixer.parameters()), "ds_id")  # ZeRO-3 gathers parameters at each module call
    number = EQUAL_GROUPS if gathers else None
    if number not in row.groups:
        row.groups[number] = PaddedGroups(row.segments, number)
    groups: PaddedGroups = row.groups[number]
    by_token = {
        name: groups.unpack(value)
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.shape[:2] == (1, row.tokens)
    }
    rest: dict[str, Any] = {
        name: None
        for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
    }
    if "use_cache" in signature.parameters:
        rest["use_cache"] = False
    mixed = [own(**rest | dict(zip(by_token, parts))) for parts in zip(*by_token.values(), strict=True)]
    if isinstance(mixed[0], tuple):  # (mixed states, recurrent states for a cache, ...)
        return groups.pack([output[0] for output in mixed]), *[None] * (len(mixed[0]) - 1)
    return groups.pack(mixed)


def has_attention(model: Any) -> bool:
    """Whether the language model has attention; pure Mamba models mix tokens only in their mixers."""
    mixed = {part for mixer in find(model) for part in mixer.modules()}
    return not mixed or any("Attention" in type(part).__name__ for part in model.modules() if part not in mixed)
