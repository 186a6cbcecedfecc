"""Make the model of rank 1 raise in its third forward pass of training."""

import functools
import os
import sys

from after_import import AfterImport

MODEL = "transformers.models.qwen2.modeling_qwen2"
STEP = 3


def change(module):
    import torch

    stock = module.Qwen2ForCausalLM.forward
    calls = []

    @functools.wraps(stock)
    def forward(self, *args, **kwargs):
        if self.training and torch.is_grad_enabled():  # not a trial of the model's loss before training
            calls.append(1)
            if len(calls) == STEP:
                raise RuntimeError("the test's model fails")
        return stock(self, *args, **kwargs)

    module.Qwen2ForCausalLM.forward = forward


if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, AfterImport(MODEL, change))
