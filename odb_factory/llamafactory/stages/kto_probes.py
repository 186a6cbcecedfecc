"""What `StepKL` relies on in LLaMA-Factory's trainer for KTO and in trl's, tried before training."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from odb_factory.errors import ConfigError

PARAMETERS = {
    "forward": ("model", "batch", "prefix"),
    "concatenated_forward": ("model", "batch"),
    "compute_reference_log_probs": ("model", "batch"),
    "get_batch_loss_metrics": ("model", "batch"),
    "kto_loss": (
        "policy_chosen_logps", "policy_rejected_logps", "policy_KL_logps",
        "reference_chosen_logps", "reference_rejected_logps", "reference_KL_logps",
    ),
}  # fmt: skip
"""Methods of the trainer, and what they take first."""
KL = 0.5


def check_trainer(trainer: Any) -> None:
    """Raises a one-line `ConfigError` where a method takes other arguments, or the loss is not one of the log-ratio
    less the estimate. Ranks call it together."""
    for name, expected in PARAMETERS.items():
        method = getattr(trainer, name, None)
        found = tuple(inspect.signature(method).parameters) if method is not None else ()
        if found[: len(expected)] != expected:
            _differs(f"{type(trainer).__name__}.{name} takes {', '.join(found) or 'nothing'}")
    if not getattr(trainer, "calculate_KL", False):
        _differs(f"{type(trainer).__name__}.calculate_KL is not True")
    device = trainer.accelerator.device
    chosen, rejected = torch.tensor([2.0, -1.0], device=device), torch.tensor([1.0, 0.25, -3.0], device=device)
    examples = torch.full((5,), KL, device=device)
    with torch.no_grad():
        stock = _losses(trainer, chosen, rejected, examples)
        trainer.calculate_KL = False
        try:
            ours = _losses(trainer, chosen - KL, rejected - KL, examples)
        finally:
            trainer.calculate_KL = True
    if stock.shape != ours.shape or not torch.allclose(stock, ours) or not 0 < stock.std() < 1:
        _differs(f"{type(trainer).__name__}.kto_loss is no loss of the log-ratios less the KL estimate")


def _losses(trainer: Any, chosen: torch.Tensor, rejected: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like
    losses: torch.Tensor = trainer.kto_loss(chosen, rejected, kl, zero(chosen), zero(rejected), zero(kl))[0]
    return losses


def _differs(what: str) -> None:
    raise ConfigError(
        f"odb: {what}, so odb_factory could not estimate its KL divergence as this release means it; install a "
        "supported release (`odb-factory doctor` names them)."
    )
