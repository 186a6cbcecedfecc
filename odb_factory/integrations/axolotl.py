"""axolotl: a plugin that reads an `odb:` block and calls `enable_odb` on the trainer that axolotl has made.

In the YAML of a training (`sample_packing` off: it would join rows before odb sees them)::

    plugins:
      - odb_factory.integrations.axolotl.ODBPlugin
    odb:
      token_budget: 16384

Needs axolotl, which pins its own versions of transformers and trl: an environment without LLaMA-Factory.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError
from odb_factory.training.trainer import enable_odb

REFUSED = {
    "sample_packing": "it joins rows before odb sees them, and odb fills micro-batches with whole rows",
    "pad_to_sequence_len": "it pads every row to the longest possible",
    "rl": "odb drives axolotl's supervised fine-tuning only",
}


class ODBArgs(BaseModel):
    """What the plugin adds to axolotl's configuration."""

    odb: dict[str, Any] | None = None

    @field_validator("odb")
    @classmethod
    def _is_a_block(cls, block: dict[str, Any] | None) -> dict[str, Any] | None:
        if block is not None:
            ODBConfig.from_block(block)
        return block


class ODBPlugin(BasePlugin):
    """Named under `plugins:`; does nothing without an `odb:` block."""

    def get_input_args(self) -> str:
        return f"{__name__}.ODBArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Raises `ConfigError` if the block or another key of the YAML cannot work."""
        if cfg.odb is None:
            return
        for key, why in REFUSED.items():
            if cfg[key]:
                raise ConfigError(f"{key}: {cfg[key]!r} does not go with odb: {why}; remove the key or the odb: block.")
        enable_odb(trainer, ODBConfig.from_block(dict(cfg.odb)))
