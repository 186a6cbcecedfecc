"""`balance_encoder` in a training: the ranks share the work of the vision tower, through `EncoderDoor`."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from odb_factory.accounting.statistics import Computing
from odb_factory.data.agreement import compare
from odb_factory.data.ranks import gather_once, patience_of, ring_of
from odb_factory.log import get_logger
from odb_factory.model.encoder import EncoderDoor, cost_of, find_tower
from odb_factory.planner import EncoderCost, EncoderPlan, plan_encoders

logger = get_logger(__name__)

_kept: list[Any] = []
"""Process groups of trainings that have failed, to the end of the process."""


class SharedEncoder:
    """The vision tower of a training's model, whose work all ranks share in every forward within `balanced`.

    trainer: with odb, in `train()`. tower: of its model, as `find_tower` has found it.
    """

    def __init__(self, trainer: Any, tower: tuple[Any, str]):
        config, parent = trainer.odb.config, trainer.odb.process_group
        trains = any(parameter.requires_grad for parameter in getattr(*tower).parameters())
        pair, patch, token = cost_of(tower[0].config, trains_tower=trains)
        self._trainer, self._cost = trainer, EncoderCost(pair=pair, patch=patch, token=token)
        self._weighs_tokens = config.balance_encoder == "auto"
        self._exchange = ring_of(parent, config.exchange_timeout_s).main
        group: Any = dist.new_group(
            None if parent is None else dist.get_process_group_ranks(parent),
            timeout=timedelta(seconds=patience_of(parent)),
            use_local_synchronization=parent is not None,
            group_desc="odb_factory encoder",
        )
        self._door = EncoderDoor(tower, group, self._gather, self._assign)

    @classmethod
    def of(cls, trainer: Any) -> SharedEncoder | None:
        """None if the block does not ask for it, or it has no effect (logged). Collective.

        Raises `CollectiveError` on all ranks if they differ in that: a rank alone would wait for its process group.
        """
        config = trainer.odb.config
        if trainer.args.world_size == 1:
            return None
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
            return None
        shared = cls(trainer, tower)
        logger.info("balance_encoder: %s: images move to the rank that encodes them", config.balance_encoder)
        return shared

    @contextlib.contextmanager
    def balanced(self, computing: Computing) -> Iterator[None]:
        """Within it forwards of the model are of this micro-batch, which the run has begun, on all ranks."""
        self._plans: list[EncoderPlan] = []
        with self._door.balanced():
            yield
        computing.encoded = tuple(self._plans)

    def _gather(self, images: Any) -> list[Any]:
        contents = self._exchange.gather(pickle.dumps(images, 5), "sharing the vision tower")
        return list(map(pickle.loads, contents))

    def _assign(self, patches: list[np.ndarray], tokens: list[int]) -> EncoderPlan:
        training = self._trainer.odb.training
        weighed = tokens if self._weighs_tokens else None
        plan = plan_encoders(patches, self._cost, weighed, max_patches=training.run.config.max_patches)
        self._plans.append(plan)
        training.memory.encoded = int(plan.patches[self._exchange.rank])
        return plan

    def close(self, *, failed: bool = False) -> None:
        """failed: the training ends by an error, so other ranks may wait."""
        self._door.undo()
        if failed:  # the destructor of a group in use would wait for the call under way
            _kept.append(self._door.group)
        elif dist.is_initialized():
            dist.destroy_process_group(self._door.group)
