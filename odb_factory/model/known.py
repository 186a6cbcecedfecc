"""Integer tensors of a micro-batch with a copy of their values on the host, so that no read waits for the device.

A collator creates token ids, labels, masks, positions and patch grids on the host. A transformers model gets these
tensors on the device and reads some values back: grids, to split images; masks, because the number of selected tokens
determines a result's shape. Each read waits until the device has finished all queued work. `Known` is a tensor on the
device with a host copy of its values:

- an operation whose inputs are all known integers runs on the host, and its result is known;
- a known mask used as an index is replaced by the indices of its true elements, which are known;
- every other operation gets an ordinary tensor, copied to the device once, without waiting.

The device still computes all floating-point numbers, so losses and gradients are bit-identical. Code that reads memory
by address (a Triton kernel) gets the address of the ordinary tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from odb_factory.log import get_logger
from odb_factory.model.flat_row import copy_to

logger = get_logger(__name__)

LARGEST = 2**22
"""Largest result (elements) of several known tensors that the host computes; for larger results, such as a mask
[tokens, tokens], the device is faster."""
ON_CPU = "ACCELERATE_TORCH_DEVICE" in os.environ
"""Use `Known` on a CPU too, where no read waits, if accelerate's device is set: to count reads that would wait on a
GPU."""

aten = torch.ops.aten
_BY_PLACES = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
}  # fmt: skip
"""Operations whose second argument is a list of indices or masks."""


class Known(Tensor):
    """An integer or bool tensor on `device` with the values of `host`, a CPU tensor.

    Example::

        grid = Known(torch.tensor([[1, 4, 6]]), torch.device("cuda", 0))
        grid.prod(-1).tolist()  # does not wait
        pixels.split(grid.prod(-1).tolist())
    """

    host: Tensor
    _made: dict[str, Any]
    """Cache of tensors derived from `host`, and torch's version counter of the values they were derived from."""

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device) -> Known:
        layout: dict[str, Any] = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        known: Known = Tensor._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, device=device, **layout)
        known.host, known._made = host, {}
        return known

    def __init__(self, host: Tensor, device: torch.device):
        super().__init__()

    def ordinary(self) -> Tensor:
        """An ordinary tensor on the device with the same values."""
        return self._make("ordinary", self._copied)

    def places(self) -> Sequence[Tensor]:
        """Indices of the true elements of this mask: int64[selected] on the device per dimension, without trailing
        dimensions over which the mask is expanded."""
        return self._make("places", self._selected)

    def _make(self, name: str, make: Callable[[], Any]) -> Any:
        """The cached result of `make`, renewed after a write: torch counts writes across all views of the memory."""
        if self.is_inference() or self._made.get("version") != self._version:
            self._made = {} if self.is_inference() else {"version": self._version}
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def _copied(self) -> Tensor:
        dense = self.host[tuple(slice(1) if stride == 0 else slice(None) for stride in self.host.stride())]
        own = dense.clone() if dense.is_pinned() else dense  # pinned memory may be overwritten during the copy
        return copy_to(own, self.device).expand(self.host.shape)

    def _selected(self) -> Sequence[Tensor]:
        host = self.host
        while host.dim() > 1 and host.stride(-1) == 0 and host.shape[-1] > 0:
            host = host[..., 0]
        return [Known(indices, self.device).ordinary() for indices in host.nonzero(as_tuple=True)]

    # Methods in which torch reads a tensor's memory without dispatching an operation.

    def tolist(self) -> Any:
        return self.host.numpy().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.host.numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.host.numpy().__array__(*args, **kwargs)

    def data_ptr(self) -> int:
        return self.ordinary().data_ptr()

    def __setitem__(self, index: Any, value: Any) -> None:
        """Wrap a number as `Known`; torch would create a device tensor."""
        is_tensor = isinstance(value, Tensor)
        super().__setitem__(index, value if is_tensor else Known(torch.tensor(value, dtype=self.dtype), self.device))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Known({self.host.numpy()}, device={self.device})"

    def __format__(self, spec: str) -> str:
        return format(self.host.numpy() if self.dim() else self.item(), spec)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.ordinary().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.ordinary().__reduce_ex__(protocol)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags:
            return NotImplemented  # the shape of a wrapper subclass is fixed
        leaves = list(_leaves((*args, *kwargs.values())))
        known = [leaf for leaf in leaves if isinstance(leaf, Known)]
        device = known[0].device
        is_elsewhere = any(
            isinstance(leaf, torch.device) and (leaf.type != device.type or leaf.index not in (None, device.index))
            for leaf in leaves
        )
        # 1. values read by the host, copies to another device
        if func is aten._local_scalar_dense.default:
            return known[0].host.numpy().item()
        if func is aten._to_copy.default and is_elsewhere:
            return func(known[0].host, *args[1:], **kwargs)
        if func in (aten.detach.default, aten.alias.default):
            alias = Known(known[0].host, device)
            alias._made = known[0]._made
            return alias
        # 2. on the host, if all inputs are known and the result has no fractions
        is_of_device = (
            any(isinstance(leaf, Tensor) and not isinstance(leaf, Known) for leaf in leaves)
            or func is aten.record_stream.default
            or torch.Tag.nondeterministic_seeded in func.tags  # must use the device's random generator
            or any(isinstance(leaf, torch.dtype) and _has_fractions(leaf) for leaf in leaves)
            or is_elsewhere
            or (len(known) > 1 and _elements(known) > LARGEST)
        )
        if not is_of_device:
            result = _call(func, args, kwargs, _on_host)
            if not any(isinstance(leaf, Tensor) and _has_fractions(leaf.dtype) for leaf in _leaves((result,))):
                return _mapped(lambda leaf: _as_known(leaf, known), result)
        # 3. on the device, with indices instead of masks
        if (selected := _selected(func, args)) is not None:
            return selected
        if func in _BY_PLACES:
            args = (args[0], [place for index in args[1] for place in _as_places(index)], *args[2:])
        result = _call(func, args, kwargs, ordinary)
        if func._schema.is_mutable and func is not aten.record_stream.default:
            named = dict(zip((argument.name for argument in func._schema.arguments), args)) | dict(kwargs)
            is_write = {a.name: a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments}
            for leaf in _leaves([value for name, value in named.items() if is_write[name]]):
                if isinstance(leaf, Known):  # update the host copy; this waits for the device
                    leaf.host.copy_(leaf.ordinary())
        return result


# Arguments of an operation


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    """Flatten lists and tuples in the arguments or results of an operation."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(map(function, value)) if isinstance(value, list | tuple) else function(value)


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]) -> Any:
    return func(
        *(_mapped(change, value) for value in args), **{key: _mapped(change, value) for key, value in kwargs.items()}
    )


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _elements(known: Sequence[Known]) -> int:
    """Upper bound of the size (elements) of an elementwise result; 0 if the shapes do not broadcast."""
    if (at_most := math.prod(tensor.numel() for tensor in known)) <= LARGEST:
        return at_most
    try:
        return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in known)))
    except RuntimeError:
        return 0


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.host if isinstance(leaf, Known) else leaf


def ordinary(value: Any) -> Any:
    """The ordinary tensor of a `Known`; any other value unchanged."""
    return value.ordinary() if isinstance(value, Known) else value


def _as_known(result: Any, known: Sequence[Known]) -> Any:
    """Wrap a host result of an operation on `known`; for an in-place write, return the `Known` that was written."""
    if not isinstance(result, Tensor):
        return result
    written = [tensor for tensor in known if result is tensor.host]
    return written[0] if written else Known(result, known[0].device)


# Masks as indices


def _is_mask(index: Any) -> bool:
    return isinstance(index, Known) and index.dtype in (torch.bool, torch.uint8)


def _selected(func: Any, args: Sequence[Any]) -> Tensor | None:
    """The result of an operation that selects values with one known mask; None for any other operation."""
    if func is aten.index.Tensor and len(args[1]) == 1 and _is_mask(args[1][0]):
        return _select(ordinary(args[0]), args[1][0])
    if func is aten.masked_scatter_backward.default and _is_mask(args[1]):
        gradient, mask, sizes = args
        shape = torch.broadcast_shapes(gradient.shape, mask.shape)
        values = _select(ordinary(gradient).expand(shape), mask.expand(shape))
        return nn.functional.pad(values, (0, math.prod(sizes) - len(values))).view(sizes)
    return None


def _select(values: Tensor, mask: Known) -> Tensor:
    """values[mask]; selects whole rows if the mask is expanded over the last dimensions."""
    places = mask.places()
    return values[tuple(places)].flatten(0, mask.dim() - len(places))


def _as_places(index: Any) -> Sequence[Any]:
    if not _is_mask(index):
        return [index]
    return [Known(indices, index.device).ordinary() for indices in index.host.nonzero(as_tuple=True)]


# Micro-batches


def with_known_integers(batch: Any, device: torch.device) -> Any:
    """Replace integer and bool CPU tensors of a batch by `Known` tensors on `device`; all other values stay unchanged.

    batch = with_known_integers(batch, torch.device("cuda", 0))
    loss = model(**batch).loss  # 40 to 100 fewer reads in a vision-language model
    """
    if isinstance(batch, Mapping):
        kind: Any = type(batch)
        return kind({key: with_known_integers(value, device) for key, value in batch.items()})
    is_plain = type(batch) is Tensor and batch.device.type == "cpu" and batch.layout is torch.strided
    return Known(batch, device) if is_plain and not _has_fractions(batch.dtype) else batch


def can_know(model: nn.Module, device: torch.device) -> bool:
    """Whether `Known` works for this model and helps: the device is not a CPU (reads there do not wait), and the model
    is not compiled (graphs of torch.compile take ordinary tensors)."""
    if device.type == "cpu" and not ON_CPU:
        return False
    for module in model.modules():
        config = getattr(module, "config", None)
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None
        if is_compiled or type(module).__name__ == "OptimizedModule":
            return False
        if getattr(config, "_attn_implementation", None) == "flex_attention":  # compiles its kernel
            return False
    try:
        mask = Known(torch.tensor([[True, False]]), torch.empty(0, device=device).device)
        works = (~mask).nonzero().tolist() == [[0, 1]] and len(torch.zeros(1, 2, device=device)[mask]) == 1
    except Exception as error:
        logger.info("the device is asked for integers that the host knows: this torch cannot do without (%s)", error)
        return False
    return works
