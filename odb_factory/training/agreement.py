"""What the ranks of a training compare before the first step: arguments, the model's config (I11)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from odb_factory.comm.agreement import MayDiffer
from odb_factory.training.checks import unwrapped
from odb_factory.training.oom import deepspeed_config

NOT_COMPARED = {
    # Of one process or one node, or compared elsewhere: `compare_output_dirs`, `find_checkpoint`, the odb: block.
    "_name_or_path", "device_map", "local_rank", "logging_dir", "odb", "output_dir", "resume_from_checkpoint",
    "transformers_version",
    # Secret.
    "hf_hub_token", "hub_token", "ms_hub_token", "om_hub_token", "push_to_hub_token", "swanlab_api_key",
    "swanlab_lark_secret", "swanlab_lark_webhook_url",
}  # fmt: skip
MAY_DIFFER = {
    # Where things are on a node.
    "adapter_folder", "adapter_name_or_path", "base_model_name_or_path", "cache_dir", "dataset_dir", "media_dir",
    "model_name_or_path", "new_special_tokens_config", "nvme_path", "offload_folder", "ref_model",
    "ref_model_adapters", "reward_model", "reward_model_adapters", "tokenized_path",
    # How fast data are read.
    "data_shared_file_system", "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory",
    "dataloader_prefetch_factor", "overwrite_cache", "preprocessing_num_workers",
    # What is printed, logged and uploaded.
    "debug", "disable_tqdm", "enable_torch_profiler", "log_level", "log_level_replica", "log_on_each_node",
    "plot_loss", "print_param_status", "profile_modules", "project", "push_to_hub", "report_to", "run_name",
    "skip_memory_metrics", "use_swanlab",
    # How the process runs.
    "ddp_timeout", "low_cpu_mem_usage", "master_addr", "master_port", "overwrite_output_dir", "use_cpu",
}  # fmt: skip
PREFIXES_THAT_MAY_DIFFER = ("export_", "hub_", "profiler_", "ray_", "sglang_", "swanlab_", "trackio_", "vllm_")
"""Of arguments for trackers, profilers, and what comes after the training."""


def of_arguments(*owners: Any) -> dict[str, object]:
    """All fields of argument dataclasses as settings: nested values under dotted keys, such as `fsdp_config.version`.

    Fields of one process, and secrets, are left out; those that change nothing of what is trained may differ.
    """
    found: dict[str, object] = {}
    for owner in owners:
        for item in dataclasses.fields(owner):
            if item.name == "deepspeed":  # the path of a config, or the config
                _add(found, item.name, deepspeed_config(owner))
            elif not item.name.startswith("_"):
                _add(found, item.name, getattr(owner, item.name, None))
    return found


def of_trainer(trainer: Any) -> dict[str, object]:
    """Training arguments, trainer, loss function, model and adapters."""
    loss = trainer.compute_loss_func
    model = unwrapped(trainer.model)
    found: dict[str, object] = {
        **of_arguments(trainer.args),
        "trainer": type(trainer).__name__,
        "compute_loss_func": getattr(loss, "__qualname__", type(loss).__name__),
        "model": type(model).__name__,
    }
    _add(found, "model.config", getattr(model, "config", None))
    _add(found, "peft_config", getattr(trainer.model, "peft_config", None))
    return found


def _add(found: dict[str, object], key: str, value: Any) -> None:
    """Put a value, or what is inside it, under its key."""
    name = key.rpartition(".")[2]
    if name in NOT_COMPARED:
        return
    value = _plain(value)
    if isinstance(value, dict) and value:
        for inner in sorted(value):
            _add(found, f"{key}.{inner}", value[inner])
        return
    may_differ = name in MAY_DIFFER or name.startswith(PREFIXES_THAT_MAY_DIFFER)
    found[key] = MayDiffer(value) if may_differ else value


def _plain(value: Any) -> Any:
    """Numbers, texts, lists and dicts; of other objects what they say of themselves, but not where they are."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text
