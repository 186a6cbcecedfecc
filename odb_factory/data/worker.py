"""A data worker: how its collator is sent to it, and what it does beside its tasks."""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import pickle
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from odb_factory.comm.standing import is_stopped
from odb_factory.data.plan_process import watch_parent
from odb_factory.errors import ConfigError, one_line

# ----------------------------------------------------------------------------------------------------------------------
# Send a collator to a worker process that is not forked, without the weights of a model it holds.
# LLaMA-Factory's collator holds the model, for its config and its `get_rope_index`. Pickled unchanged, every worker
# would get a copy of all weights. So each module is sent with tensors of torch's device "meta" in their place: code
# that needs only the config works as before, and code that needs a weight raises.

NOT_SENT = (
    "cannot be sent to a worker process, as the start methods 'spawn' and 'forkserver' require ({}); make it "
    "picklable, choose 'fork' (multiprocessing.set_start_method), or use no workers (num_workers and "
    "collate_workers 0)."
)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


class Picklable:
    """A callable that can be sent to a worker of any start method; there it is the plain callable again.

    Attributes and calls go to `inner`. role: its name in messages. A model in it is pickled once: engines that wrap the
    model later on (FSDP, DeepSpeed) make it unpicklable. Sending raises `ConfigError` if `inner` cannot be pickled.
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
            raise ConfigError(f"{self.role}: {type(self.inner).__name__} {NOT_SENT.format(one_line(error))}") from None
        return pickle.loads, (buffer.getvalue(),)


class _Pickler(ForkingPickler):
    """Pickles modules without their weights. models: the pickles of modules that were sent before, by their id."""

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
        # Hooks belong to the trainer of the model, functions are often closures of an engine.
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


# ----------------------------------------------------------------------------------------------------------------------
# What a data worker does beside its tasks: watch its parent process, run `worker_init_fn`, publish its row.

T = TypeVar("T")

RETRY_PAUSE_S = 0.1


def worker_seed(seed: int, rank: int, stage: int, epoch: int) -> int:
    """A seed for the workers of one stage; torch adds the number of the worker to it.

    seed: torch's global one, or that of the DataLoader's generator. The seeds of ranks, stages and epochs are
    independent (numpy's `SeedSequence`).
    """
    return int(np.random.SeedSequence(seed, spawn_key=(rank, stage, epoch)).generate_state(1, np.uint64)[0] >> 1)


class BusyRows:
    """The row that each worker of a stage works at, for messages of the process that waits for them.

    A table in shared memory, a line for each worker and one for the process itself: process id, row (-1: none), and
    since when (`time.monotonic`, the same in all processes of a machine). Workers beyond `num_workers` share the last.
    """

    def __init__(self, num_workers: int = 0):
        self._table = torch.zeros(num_workers + 1, 3, dtype=torch.float64)
        if num_workers:
            self._table.share_memory_()

    @contextmanager
    def at(self, row: int) -> Iterator[None]:
        """The calling process works at this row."""
        info = get_worker_info()
        line = self._table[-1 if info is None else min(info.id, len(self._table) - 1)]
        line[:] = torch.tensor([os.getpid(), row, time.monotonic()], dtype=torch.float64)
        try:
            yield
        finally:
            line[1] = -1

    def close(self) -> None:
        """Release the shared memory; the workers have ended."""
        self._table = self._table.clone()

    def describe(self, task: str) -> str:
        """The worker that has been at its row for longest, or one that is stopped. task: a verb, such as "observes"."""
        lines = [(int(pid), int(row), since) for pid, row, since in self._table.tolist() if pid]
        busy = sorted((since, pid, row) for pid, row, since in lines if row >= 0)
        stopped = [pid for pid, _, _ in lines if is_stopped(pid)]
        if not busy:
            return f"a data worker that {task}" + "".join(
                f", of which pid {pid} is stopped by a signal" for pid in stopped
            )
        _, pid, row = busy[0]
        who = "this process, which" if pid == os.getpid() else f"the data worker (pid {pid}) that"
        halted = ", and is stopped by a signal" if pid in stopped else ""
        return f"{who} {task} row {row} of the training dataset{halted}"


def retried(call: Callable[[], T], final: tuple[type[Exception], ...] = ()) -> T:
    """`call()`, repeated once if it raises: a second read of a network disk often succeeds. final: not repeated."""
    try:
        return call()
    except final:
        raise
    except OSError:
        time.sleep(RETRY_PAUSE_S)
    except Exception:
        pass
    return call()


class WorkerDataset(Dataset):
    """A dataset that is sent to worker processes, and wraps the user's own (`dataset`).

    A worker process that is being started watches its parent before it unpickles anything else, which may take long or
    never end; a process that unpickles it for another purpose does not.
    sends_dataset: False if `dataset` is for `worker_init_fn` alone: only a forked worker has it.
    """

    dataset: Any
    sends_dataset = True

    def __reduce__(self) -> tuple[Any, ...]:
        watch = _ParentWatch(os.getpid()) if get_spawning_popen() is not None else None
        return _new, (watch, type(self)), self.__dict__ if self.sends_dataset else self.__dict__ | {"dataset": None}


class _ParentWatch:
    """Unpickling it calls `watch_parent`."""

    def __init__(self, pid: int):
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        return watch_parent, (self.pid,)


def _new(watch: None, kind: Any) -> Any:
    return kind.__new__(kind)


class WorkerInit:
    """The `worker_init_fn` of our DataLoaders: watches the parent, then calls the user's own (if any).

    The user's finds its own dataset in `get_worker_info().dataset` (None in a collating worker that was not forked).
    """

    def __init__(self, init_fn: Callable[[int], None] | None):
        self.init_fn = init_fn

    def __call__(self, worker_id: int) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None and parent.pid is not None, "only a worker calls this"
        watch_parent(parent.pid)
        if self.init_fn is not None:
            info = get_worker_info()
            assert info is not None
            ours: Any = info.dataset
            object.__setattr__(info, "dataset", ours.dataset)  # it refuses plain assignment
            self.init_fn(worker_id)
