"""axolotl plugin: reads an `odb:` block and calls `enable_odb` on the trainer that axolotl creates.

In the training YAML (leave `sample_packing` off, because it joins rows before odb measures them)::

    plugins:
      - odb_factory.integrations.axolotl.ODBPlugin
    odb:
      token_budget: 16384

Needs axolotl in an environment without LLaMA-Factory, because axolotl pins its own versions of transformers and trl.
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
    """The keys that the plugin adds to axolotl's configuration."""

    odb: dict[str, Any] | None = None

    @field_validator("odb")
    @classmethod
    def _is_a_block(cls, block: dict[str, Any] | None) -> dict[str, Any] | None:
        if block is not None:
            ODBConfig.from_block(block)
        return block


class ODBPlugin(BasePlugin):
    """The plugin to list under `plugins:`; without an `odb:` block, the plugin does nothing."""

    def get_input_args(self) -> str:
        return f"{__name__}.ODBArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Enable odb. Raises `ConfigError` if the `odb:` block is invalid or conflicts with another key of the YAML."""
        if cfg.odb is None:
            return
        for key, why in REFUSED.items():
            if cfg[key]:
                raise ConfigError(f"{key}: {cfg[key]!r} does not go with odb: {why}; remove the key or the odb: block.")
        enable_odb(trainer, ODBConfig.from_block(dict(cfg.odb)))
