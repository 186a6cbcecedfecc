"""Let Triton's interpreter run Liger's kernels on a CPU: with TRITON_INTERPRET=1, also in the process that ranks are
forked from, which imports triton.

A compiled kernel gets its float arguments as float32 and calls functions of the device's library; the interpreter does
neither (triton 3.7). The file `ODB_TEST_KERNELS` gets the names of the kernels that have run.
"""

import os
import sys

from after_import import AfterImport


def change(interpreter):
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


os.environ["TRITON_INTERPRET"] = "1"
sys.meta_path.insert(0, AfterImport("triton.runtime.interpreter", change))
