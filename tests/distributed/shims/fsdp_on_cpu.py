"""Let accelerate use FSDP without an accelerator.

accelerate (1.11 to 1.15) silently ignores the FSDP plugin on MULTI_CPU and trains with DDP, although
torch's FSDP runs on CPU with gloo. This shim lifts only this condition.
"""

import os
import sys

from after_import import AfterImport

STATE = "accelerate.state"


def change(module):
    stock = module.AcceleratorState.__init__

    def __init__(self, *args, fsdp_plugin=None, **kwargs):
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and "RANK" in os.environ:
            self.distributed_type = module.DistributedType.FSDP
            module.PartialState._shared_state["distributed_type"] = self.distributed_type
            self.fsdp_plugin = fsdp_plugin

    module.AcceleratorState.__init__ = __init__


sys.meta_path.insert(0, AfterImport(STATE, change))  # also in a server that ranks are forked from
