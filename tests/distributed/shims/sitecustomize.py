"""Runs first in every process that a test starts: changes modules after their import, and delays the exit.

ODB_TEST_SHIM_BF16_ON_CPU=1 applies the shim `bf16_on_cpu` of SHIMS, and so on.
"""

import atexit
import functools
import gc
import importlib.util
import os
import sys
import time
from importlib.abc import MetaPathFinder

PREFIX = "ODB_TEST_SHIM_"
# Commands that train with LLaMA-Factory, and the scripts that they pass to torchrun.
TRAINS = {"llamafactory-cli", "launcher.py", "odb-factory", "run.py", "gpu.py", "v1_trainings.py"}


class AfterImport(MetaPathFinder):
    """Calls `change(module)` after the module `name` has run; put it first on `sys.meta_path`."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec


def gather_in_order(module):
    """When ZeRO-3 gathers several parameters, it waits only for the last gather. gloo's two threads may end the last
    gather first; an earlier gather then ends after a checkpoint is loaded and overwrites its weights: the model starts
    with arbitrary memory, without odb too (DeepSpeed 0.18.4). On a CPU DeepSpeed also compiles an operator for
    inference, which takes a minute, and again whenever PATH has another ninja."""
    stock = module.TorchBackend.all_gather_into_tensor

    @functools.wraps(stock)
    def all_gather_into_tensor(*args, **kwargs):
        handle = stock(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle

    module.TorchBackend.all_gather_into_tensor = all_gather_into_tensor
    module.build_shm_op = lambda: None  # as on a GPU


def ranks_on_cpus(module):
    """With DeepSpeed `use_cpu` is false; accelerate 1.15 then treats ranks without a GPU as single processes, and their
    batch sizes contradict DeepSpeed's. Make them ranks on CPUs, as in earlier releases."""
    stock = module.PartialState._prepare_backend

    @functools.wraps(stock)
    def _prepare_backend(self, cpu=False, *args, **kwargs):
        return stock(self, cpu or not module.torch.cuda.is_available(), *args, **kwargs)

    module.PartialState._prepare_backend = _prepare_backend


def bf16_on_cpu(module):
    """Allow `bf16` and `pure_bf16` on a CPU, which computes in bfloat16 as well: with DeepSpeed `use_cpu` is false, and
    transformers then requires a GPU; LLaMA-Factory requires one for `pure_bf16`."""
    module.is_torch_bf16_gpu_available = lambda: True


def fsdp_on_cpu(module):
    """Let accelerate use FSDP without an accelerator: accelerate (1.11 to 1.15) silently ignores the FSDP plugin on
    MULTI_CPU and trains with DDP, although torch's FSDP runs on CPU with gloo."""
    stock = module.AcceleratorState.__init__

    def __init__(self, *args, fsdp_plugin=None, **kwargs):
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and "RANK" in os.environ:
            self.distributed_type = module.DistributedType.FSDP
            module.PartialState._shared_state["distributed_type"] = self.distributed_type
            self.fsdp_plugin = fsdp_plugin

    module.AcceleratorState.__init__ = __init__


def qlora_on_cpu(module):
    """Weights stay as they are in evaluations, as on GPUs. If the CPU has AVX512-BF16, a layer in evaluation repacks
    its weights and can no longer train, without odb too (bitsandbytes 0.50.2)."""
    module.has_avx512bf16 = lambda: False


def small_groups(module):
    """Mixers compute even small samples in separate groups, so that ranks differ in the number of groups."""
    module.SMALL = 0


def triton_on_cpu(interpreter):
    """Let Triton's interpreter run Liger's kernels: with TRITON_INTERPRET=1, also in the process that ranks are forked
    from, which imports triton. A compiled kernel gets its float arguments as float32 and calls functions of the
    device's library; the interpreter does neither (triton 3.7). The file `ODB_TEST_KERNELS` gets the names of the
    kernels that ran."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice

    convert = interpreter._implicit_cvt

    def convert_floats_too(value):
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return convert(value)

    def elementwise(function):
        def call(value):
            result = function(value.handle.data).astype(value.handle.data.dtype)
            return tl.tensor(interpreter.TensorHandle(result, value.handle.dtype), value.type)

        return call

    run, names = interpreter.GridExecutor.__call__, set()

    def record_name(self, *args, **kwargs):
        if self.fn.__name__ not in names:
            names.add(self.fn.__name__)
            with open(os.environ["ODB_TEST_KERNELS"], "a", encoding="utf-8") as file:
                file.write(f"{self.fn.__name__}\n")
        return run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = record_name
    interpreter._implicit_cvt = convert_floats_too
    libdevice.rsqrt, libdevice.tanh = elementwise(lambda x: 1 / np.sqrt(x)), elementwise(np.tanh)


def v1_on_cpu(module):
    """v1's `synchronize` calls torch's, which requires a driver; on a CPU there is nothing to wait for."""
    module.synchronize = lambda: None


def collect_again(module):
    gc.freeze()
    gc.enable()


SHIMS = {
    "deepspeed_on_gloo": {"deepspeed.comm.torch": gather_in_order, "accelerate.state": ranks_on_cpus},
    "bf16_on_cpu": {"transformers.utils.import_utils": bf16_on_cpu},
    "fsdp_on_cpu": {"accelerate.state": fsdp_on_cpu},
    "qlora_on_cpu": {"bitsandbytes.nn.modules": qlora_on_cpu},
    "small_groups": {"odb_factory.model.mixers": small_groups},
    "triton_on_cpu": {"triton.runtime.interpreter": triton_on_cpu},
    "v1_on_cpu": {"llamafactory.v1.accelerator.helper": v1_on_cpu},
}
for shim in sorted(name.removeprefix(PREFIX).lower() for name in os.environ if name.startswith(PREFIX)):
    for module_name, change in SHIMS[shim].items():
        sys.meta_path.insert(0, AfterImport(module_name, change))
if f"{PREFIX}TRITON_ON_CPU" in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
if TRAINS & {os.path.basename(word) for word in sys.orig_argv}:
    # Collections while modules are imported, and later collections that scan them, take a third of a short training.
    gc.disable()
    for module_name in ("llamafactory.train.tuner", "llamafactory.v1.core.base_trainer"):
        sys.meta_path.insert(0, AfterImport(module_name, collect_again))
if "RANK" in os.environ:
    # Like `odb_factory.data.ranks.Ring.close`, for stock trainings, which also abort once in a while.
    atexit.register(time.sleep, 0.2)
