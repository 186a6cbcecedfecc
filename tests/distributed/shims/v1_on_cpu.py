"""Let several ranks of LLaMA-Factory's v1 run on a machine without the accelerator that torch is built for.

v1's `synchronize` calls torch's, which requires a driver; on a CPU there is nothing to wait for.
"""

import sys

from after_import import AfterImport

HELPER = "llamafactory.v1.accelerator.helper"


def change(module):
    module.synchronize = lambda: None


sys.meta_path.insert(0, AfterImport(HELPER, change))
