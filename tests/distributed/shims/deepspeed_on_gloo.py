"""Let DeepSpeed train on CPUs as on GPUs: gathers end in the order in which they begin, and nothing is compiled.

When ZeRO-3 gathers several parameters, it waits only for the last gather. gloo's two threads may end the last gather
first; an earlier gather then ends after a checkpoint is loaded and overwrites its weights: the model starts with
arbitrary memory, without odb too (DeepSpeed 0.18.4). On a CPU DeepSpeed also compiles an operator for inference, which
takes a minute, and again whenever PATH has another ninja.

With DeepSpeed `use_cpu` is false; accelerate 1.15 then treats ranks without a GPU as single processes, and their batch
sizes contradict DeepSpeed's. This shim makes them ranks on CPUs, as in earlier releases.
"""

import functools
import sys

from after_import import AfterImport


def gather_in_order(module):
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
    stock = module.PartialState._prepare_backend

    @functools.wraps(stock)
    def _prepare_backend(self, cpu=False, *args, **kwargs):
        return stock(self, cpu or not module.torch.cuda.is_available(), *args, **kwargs)

    module.PartialState._prepare_backend = _prepare_backend


sys.meta_path.insert(0, AfterImport("deepspeed.comm.torch", gather_in_order))
sys.meta_path.insert(0, AfterImport("accelerate.state", ranks_on_cpus))
