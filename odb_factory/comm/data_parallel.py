"""Which ranks a loop's loader shares its samples with, as it is when the first batch is asked for."""

from __future__ import annotations

import os

import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import DeviceMesh

from odb_factory.errors import ConfigError


def find_process_group(given: dist.ProcessGroup | None, *, is_prepared: bool) -> dist.ProcessGroup | None:
    """The data-parallel ranks: `given`, else those of accelerate's mesh, else None (the default group, if any).

    is_prepared: accelerate has prepared the loader. Raises `ConfigError` where they cannot be told.
    """
    if not (dist.is_available() and dist.is_initialized()):
        _check_alone(given)
        return None
    if given is not None:
        return given
    return _of_accelerate() if is_prepared else None


def world_size_of(group: dist.ProcessGroup | None) -> int:
    """1 where torch.distributed is not initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def check_process_group(given: object) -> None:
    """Raise `ConfigError` for what is no process group of this rank."""
    if given is None or isinstance(given, dist.ProcessGroup):
        return
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "process_group: this rank is not in it; make the loader on the ranks of the group, each with its own."
        )
    hint = ': take its group, mesh["dp"].get_group()' if isinstance(given, DeviceMesh) else ""
    raise ConfigError(
        f"process_group: expected the torch.distributed.ProcessGroup of the data-parallel ranks, found a "
        f"{type(given).__name__}{hint}."
    )


def _check_alone(given: dist.ProcessGroup | None) -> None:
    """A launcher has started several processes, and this one does not know of the others."""
    if given is not None:
        raise ConfigError("process_group: torch.distributed, to which it belonged, is no longer initialised.")
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:
        raise ConfigError(
            f"WORLD_SIZE: {ranks} processes were started, but torch.distributed is not initialised here, so each would "
            "train on the whole dataset; call torch.distributed.init_process_group() before the first batch, or remove "
            "WORLD_SIZE from the environment if this process trains alone."
        )


def _of_accelerate() -> dist.ProcessGroup | None:
    state = AcceleratorState()
    mesh: DeviceMesh | None = getattr(state, "ds_device_mesh", None)
    if mesh is None:
        mesh = getattr(state, "device_mesh", None)
    if mesh is None:
        return None
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names or ()}
    if sizes.get("cp", 1) > 1 or sizes.get("sp", 1) > 1:
        raise ConfigError(
            "accelerate's mesh has a context or sequence parallel dimension, which cuts rows apart after they were "
            "grouped; odb does not support it yet: set its size to 1."
        )
    for name in ("dp", *sizes):  # accelerate makes dp of several dimensions
        if not name.startswith("dp"):
            continue
        try:
            group = mesh[name].get_group()
        except KeyError:
            continue
        if dist.get_world_size(group) == mesh.size() // sizes.get("tp", 1):
            return group
    raise ConfigError(
        f"accelerate's mesh ({', '.join(f'{name} {size}' for name, size in sizes.items())}) has no data-parallel "
        "dimension by which odb could deal out samples; give process_group=, the data-parallel ranks of this one."
    )
