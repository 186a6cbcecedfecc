"""`balance_encoder` in a training: the ranks share the work of the vision tower, by `EncoderDoor`."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from odb_factory.data.ranks import compare, gather_once, patience_of, ring_of
from odb_factory.log import get_logger
from odb_factory.model.encoder import EncoderDoor, cost_of, find_tower
from odb_factory.planner import EncoderCost, EncoderPlan, plan_encoders

logger = get_logger(__name__)

_kept: list[Any] = []
"""Process groups of failed trainings, which live to the end of the process."""


@contextlib.contextmanager
def shared_encoder(trainer: Any) -> Iterator[EncoderDoor | None]:
    """Within it the ranks share the work of the vision tower in every forward within the door's `balanced`. Yields None
    without the key `balance_encoder`, or if it has no effect (logged). Collective.

    Raises `CollectiveError` on all ranks if they differ in this: a single rank would wait for its process group.
    """
    config, parent = trainer.odb.config, trainer.odb.process_group
    if trainer.args.world_size == 1:
        yield None
        return
    # Whether images can move: all ranks compare the answer before one of them waits for another.
    tower = find_tower(trainer.model) if config.balance_encoder else None
    why = None
    if config.balance_encoder and tower is None:
        name = trainer.model.config.model_type
        why = f"no vision tower of {name} is known whose features follow the order of its images"
    elif config.balance_encoder and trainer.args.torch_compile:
        why = "torch_compile compiles the model's forward, in which ranks would exchange images"
    compare(
        {"odb.balance_encoder": config.balance_encoder, "why balance_encoder has no effect": why},
        lambda message: gather_once(message, config.exchange_timeout_s),
    )
    if why is not None:
        logger.info("balance_encoder: %s has no effect: %s", config.balance_encoder, why)
    if tower is None or why is not None:
        yield None
        return
    # What an image costs, and ways between ranks: the ring for metadata, a group for tensors.
    trains = any(parameter.requires_grad for parameter in getattr(*tower).parameters())
    pair, patch, token = cost_of(tower[0].config, trains_tower=trains)
    cost = EncoderCost(pair=pair, patch=patch, token=token)
    exchange = ring_of(parent, config.exchange_timeout_s).main
    group: Any = dist.new_group(
        None if parent is None else dist.get_process_group_ranks(parent),
        timeout=timedelta(seconds=patience_of(parent)),
        use_local_synchronization=parent is not None,
        group_desc="odb_factory encoder",
    )

    def gather(images: Any) -> list[Any]:
        return list(map(pickle.loads, exchange.gather(pickle.dumps(images, 5), "sharing the vision tower")))

    def assign(patches: list[np.ndarray], tokens: list[int]) -> EncoderPlan:
        training = trainer.odb.training
        weighed = tokens if config.balance_encoder == "auto" else None
        plan = plan_encoders(patches, cost, weighed, max_patches=training.config.max_patches)
        computing = training.accounting.computing
        computing.encoded = (*computing.encoded, plan)
        return plan

    # The door acts in the forwards of the training.
    door = EncoderDoor(tower, group, gather, assign)
    logger.info("balance_encoder: %s: images move to the rank that encodes them", config.balance_encoder)
    try:
        yield door
    except BaseException:  # other ranks may wait in a call, and the destructor of the group would wait for its end
        _kept.append(group)
        raise
    else:
        if dist.is_initialized():
            dist.destroy_process_group(group)
    finally:
        door.undo()
