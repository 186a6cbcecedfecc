"""Let several ranks of LLaMA-Factory's v1 run without an accelerator on a torch that is built for one.

Its `synchronize` calls torch's, which looks for a driver; there is nothing to wait for on a CPU.
"""

import sys

from after_import import AfterImport

HELPER = "llamafactory.v1.accelerator.helper"


def change(module):
    module.synchronize = lambda: None


sys.meta_path.insert(0, AfterImport(HELPER, change))
