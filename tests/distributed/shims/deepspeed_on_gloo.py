"""Let DeepSpeed's gathers end in the order in which they begin, as they do on a GPU.

When ZeRO-3 gathers several parameters it waits for the last one only. gloo's two threads may end that one first, and
then an earlier one arrives after the weights of a checkpoint and replaces them: the model begins with whatever was in
memory, without odb too (DeepSpeed 0.18.4).
"""

import functools
import sys

from after_import import AfterImport


def change(module):
    stock = module.TorchBackend.all_gather_into_tensor

    @functools.wraps(stock)
    def all_gather_into_tensor(*args, **kwargs):
        handle = stock(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle

    module.TorchBackend.all_gather_into_tensor = all_gather_into_tensor


sys.meta_path.insert(0, AfterImport("deepspeed.comm.torch", change))
