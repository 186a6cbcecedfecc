"""Let bitsandbytes train on CPUs as on GPUs: weights stay as they are in evaluations.

If the CPU has AVX512-BF16, a layer in evaluation repacks its weights and can no longer train, without odb too
(bitsandbytes 0.50.2).
"""

import sys

from after_import import AfterImport


def change(module):
    module.has_avx512bf16 = lambda: False


sys.meta_path.insert(0, AfterImport("bitsandbytes.nn.modules", change))
