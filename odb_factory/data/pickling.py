"""Send a collator to a worker process that is not forked, without the weights of a model it holds.

LLaMA-Factory's collator holds the model, for its config and its `get_rope_index`. Pickled as it is, every worker would
get a copy of all weights. So each module is sent with tensors of torch's device "meta" in their place: whatever needs
only the config works as before, and whatever needs a weight raises instead of returning another number.
"""

from __future__ import annotations

import functools
import io
import pickle
import types
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from odb_factory.errors import ConfigError, one_line

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


class Picklable:
    """A callable that can be sent to a worker of any start method; there it is the plain callable again.

    Attributes and calls go to `inner`. role: what messages call it. A model in it is pickled once: engines that wrap
    the model later on (FSDP, DeepSpeed) make it unpicklable.
    Raises `ConfigError`, when it is sent, where it cannot be pickled.
    """

    def __init__(self, inner: Callable[..., Any], role: str):
        self.inner, self.role = inner, role
        self._models: dict[int, bytes] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._models).dump(self.inner)
        except Exception as error:
            raise ConfigError(
                f"{self.role}: {type(self.inner).__name__} cannot be sent to a worker process, as the start methods "
                f"'spawn' and 'forkserver' have to ({one_line(error)}); make it picklable, choose 'fork' "
                "(multiprocessing.set_start_method), or take no workers (num_workers and collate_workers 0)."
            ) from None
        return pickle.loads, (buffer.getvalue(),)


class _Pickler(ForkingPickler):
    """Pickles what it holds, and modules without their weights. models: what was pickled of each before, by its id."""

    def __init__(self, file: io.BytesIO, models: dict[int, bytes]):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._models = models

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.nn.Module):
            return NotImplemented
        if id(obj) not in self._models:
            buffer = io.BytesIO()
            _ModulePickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
            self._models[id(obj)] = buffer.getvalue()
        return pickle.loads, (self._models[id(obj)],)


class _ModulePickler(ForkingPickler):
    """Pickles a module: its classes, submodules and attributes; tensors as "meta", functions as `_NotSent`."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _meta, (type(obj) is torch.nn.Parameter, tuple(obj.shape), obj.dtype)
        if not isinstance(obj, torch.nn.Module):
            return NotImplemented
        # Hooks belong to who trains the model, functions are often closures of an engine.
        blank = vars(torch.nn.Module())
        state = {name: value for name, value in vars(obj).items() if name not in blank}
        state = {name: _NotSent(name) if isinstance(value, _FUNCTIONS) else value for name, value in state.items()}
        state |= blank | {name: dict(vars(obj)[name]) for name in ("_parameters", "_buffers", "_modules")}
        return _module, (type(obj),), {**state, "training": obj.training}


class _NotSent:
    """Stands for a function that was set on a module; raises if it is called."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self.name} of the model is not there in a worker process that is not forked")


def _meta(is_parameter: bool, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _module(kind: type[torch.nn.Module]) -> torch.nn.Module:
    return kind.__new__(kind)
