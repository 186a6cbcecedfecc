"""Make the model of rank 1 raise in its third forward pass: put on PYTHONPATH, it runs first in every rank."""

import functools
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder

MODEL = "transformers.models.qwen2.modeling_qwen2"
STEP = 3


class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODEL:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            stock = module.Qwen2ForCausalLM.forward
            calls = []

            @functools.wraps(stock)
            def forward(self, *args, **kwargs):
                calls.append(1)
                if len(calls) == STEP:
                    raise RuntimeError("out of memory, the test pretends")
                return stock(self, *args, **kwargs)

            module.Qwen2ForCausalLM.forward = forward

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Finder())
