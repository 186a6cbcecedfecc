"""What `odb-factory doctor` runs in a separate process: the imports of a training, and their outcome.

Writes a JSON object (see `Probe`) to the file named as its only argument.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odb_factory.llamafactory import activation


@dataclass(kw_only=True)
class Probe:
    """What the imports showed.

    active: `import torch` placed the hook. switched_off: `ODB_FACTORY_DISABLE` forbids it.
    errors: what a module raised when imported, by module. hooked, unhooked: seams by their full name.
    own_keys: odb keys in the arguments of this LLaMA-Factory. gpus: names of the CUDA devices.
    kernels: what computes attention of flat rows in bf16, by the name of the GPU (or "cpu", where there is none).
    crash: how the process ended, if it wrote nothing.
    """

    active: bool = False
    switched_off: bool = False
    errors: dict[str, str] = field(default_factory=dict)
    hooked: list[str] = field(default_factory=list)
    unhooked: list[str] = field(default_factory=list)
    own_keys: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)
    crash: str | None = None


def run() -> Probe:
    """Import as `llamafactory-cli train` does, torch first, and look at what has been hooked."""
    probe = Probe()
    if not _imports("torch", probe):
        return probe
    probe.active = activation.is_active()
    activation.activate()
    probe.switched_off = not activation.is_active()
    os.environ.pop(activation.DISABLE, None)
    activation.activate()  # so that the seams can be judged whatever is switched off
    import torch

    probe.gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    for name in ("torchvision", "torchaudio"):
        _imports(name, probe)
    imported = [_imports(name, probe) for name in activation.SEAMS]  # all are tried
    if all(imported):
        _look_at_seams(probe)
        data_arguments = sys.modules["llamafactory.hparams.parser"].DataArguments
        names = [item.name for item in dataclasses.fields(data_arguments)]
        from odb_factory.model.attention import Need, kernel_of

        devices = {name: torch.device("cuda", index) for index, name in enumerate(probe.gpus)}
        devices = devices or {"cpu": torch.device("cpu")}
        probe.kernels = {name: kernel_of(Need(device=device, dtype=torch.bfloat16)) for name, device in devices.items()}
        probe.own_keys = [name for name in names if name in ("odb", "use_odb") or name.startswith("odb_")]
    return probe


def _look_at_seams(probe: Probe) -> None:
    from odb_factory.llamafactory import hooks

    for seam in hooks.seams():
        module, _, path = seam.partition(".")
        target: Any = sys.modules[module]
        for part in path.split("."):
            target = getattr(target, part, None)
        # A wrapper takes the name and module of what it wraps; its code tells where it comes from.
        code = getattr(target, "__code__", None)
        is_hooked = code is not None and code.co_filename == hooks.__file__
        (probe.hooked if is_hooked else probe.unhooked).append(seam)


def _imports(name: str, probe: Probe) -> bool:
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation can raise anything
        probe.errors[name] = " ".join(f"{type(error).__name__}: {error}".split())
    return name not in probe.errors


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(dataclasses.asdict(run())), encoding="utf-8")
