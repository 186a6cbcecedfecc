"""Allow `bf16` and `pure_bf16` on a CPU, which computes in bfloat16 as well.

With DeepSpeed `use_cpu` is false, and transformers then requires a GPU; LLaMA-Factory requires one for `pure_bf16`.
"""

import sys

from after_import import AfterImport


def change(module):
    module.is_torch_bf16_gpu_available = lambda: True


sys.meta_path.insert(0, AfterImport("transformers.utils.import_utils", change))
