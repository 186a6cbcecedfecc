"""Ranks share the work of the vision tower: loss and gradients do not depend on which rank has the images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from distributed.ranks import run_ranks
from model.test_tower import CLASSES, IMAGE, IMAGES, ROPE, TEXT, TOWER, VIDEOS, Grid, make_batch, make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from odb_factory.model.encoder import BY_GRID, EncoderDoor, cost_of, find_tower
from odb_factory.model.engine import engine_of, gradients_deferred
from odb_factory.model.known import with_known_integers
from odb_factory.model.tower import FAMILIES, images_at_once, one_pass
from odb_factory.planner import EncoderCost, EncoderPlan, plan_encoders

RELATIVE, IN_FLOAT32, IN_BF16 = 1e-9, 1e-5, 2e-2
"""Largest difference, relative to the norm of all gradients: in float64 (GLM-4V interpolates positions in float32), for
models with experts, and in bfloat16, whose sums depend on which images share a run of the tower."""
LIMIT_S = 240
SMALL: list[Grid] = [(1, 2, 2)]
Media = tuple[list[Grid], list[Grid]]
SCENES: dict[str, list[Media]] = {
    "all on one rank, a dummy on the other": [(IMAGES * 2, []), (SMALL, [])],
    "no image on one rank": [([], []), (IMAGES, [])],
    "videos only": [([], VIDEOS), ([], [(1, 4, 4)])],
    "images and videos on one, no image on the other": [(IMAGES, VIDEOS), ([], [])],
    "pixels of no image on one rank": [([], []), (IMAGES, [])],
    "no image at all": [([], []), ([], [])],
    "more ranks than images": [([], []), ([(1, 8, 8)], []), ([], [])],
    "two for three": [([(1, 8, 8), (1, 4, 4)], []), ([], []), (SMALL, [])],
}
MOVES = {"all on one rank, a dummy on the other", "videos only"}
"""Scenes in which images move in every family; with few images another assignment may not be better."""


def make(family: str) -> Any:
    """A tiny model in float64; in float32 with experts, because torch's kernel for experts needs it."""
    if family in CLASSES:
        model = make_model(family).train()
        return model if "moe" in family else model.double()
    kind = transformers.Glm4vForConditionalGeneration
    config = kind.config_class(
        text_config=TEXT | {"rope_parameters": ROPE},
        vision_config=TOWER | {"out_hidden_size": 32},
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        video_start_token_id=95,
        video_end_token_id=96,
        image_start_token_id=93,
    )
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation="eager").double().train()


def batch_of(family: str, media: Media) -> dict[str, Any]:
    batch = make_batch(*media)
    if family == "glm4v":  # one token for images and videos
        batch["input_ids"] = batch["input_ids"].where(batch["input_ids"] != IMAGE + 1, IMAGE)
    return batch


def train(model: Any, batch: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """The loss, and the sum over the ranks of the gradients of all parameters."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    gradients = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in model.parameters()])
    dist.all_reduce(gradients)
    return loss.item(), gradients


def gather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def train_scenes(rank: int, family: str, scenes: list[str], tuning: str = "all") -> dict[str, Any]:
    """In a rank: the differences of loss and gradients in each scene, and the patches that each rank encodes."""
    model, results = make(family), {}
    module, _ = find_tower(model)  # type: ignore[misc]
    for name, parameter in module.named_parameters():
        if tuning == "merger":
            parameter.requires_grad_("merger" in name)
        elif tuning == "text":
            parameter.requires_grad_("visual" not in name)
    if tuning == "bf16":
        model.bfloat16()
    pair, patch, _ = cost_of(module.config, trains_tower=True)
    group, plans = dist.new_group(), list[EncoderPlan]()

    def assign(patches: list[np.ndarray], tokens: list[int]) -> EncoderPlan:
        plans.append(plan_encoders(patches, EncoderCost(pair=pair, patch=patch)))
        return plans[-1]

    for name in scenes:
        batch = batch_of(family, SCENES[name][rank])
        with one_pass(model):
            loss, gradients = train(model, batch)
            door = EncoderDoor(find_tower(model), group, gather, assign)
            has_images = any(map(any, SCENES[name]))  # if not, the tower has no gradients, and DDP would wait
            no_pixels = {"pixel_values": torch.ones(0)} if "pixels of no image" in name else {}
            known = with_known_integers(no_pixels | batch, torch.device("cpu"))
            with door.balanced(), images_at_once(model):
                shared, shared_gradients = train(DistributedDataParallel(model) if has_images else model, known)
            with_gradient = gather([name for name, p in model.named_parameters() if p.grad is not None])
            assert all(names == with_gradient[0] for names in with_gradient), "else DDP waits"
            plan = plans.pop()
            assert not plans, "the tower has run once"
            again, _ = train(model, batch)
            door.undo()
        assert again == loss
        results[name] = {
            "loss": abs(shared - loss) / loss,
            "gradient": ((shared_gradients - gradients).norm() / gradients.norm()).item(),
            "moves": plan.moves,
            "patches": plan.patches.tolist(),
        }
    return results


def check(family: str, folder: Path, *, world_size: int = 2, **options: Any) -> dict[str, Any]:
    scenes = options.pop("scenes", [name for name in SCENES if len(SCENES[name]) == world_size])
    options |= {"world_size": world_size, "limit_s": LIMIT_S, "family": family, "scenes": scenes}
    ended = run_ranks("model.test_encoder:train_scenes", folder, **options)
    limit = IN_FLOAT32 if "moe" in family else IN_BF16 if options.get("tuning") == "bf16" else RELATIVE
    for name in scenes:
        for rank in ended:
            result = rank.value[name]
            assert max(result["loss"], result["gradient"]) < limit, (name, result)
        assert len({str(rank.value[name]["patches"]) for rank in ended}) == 1, "all agree"
    return ended[0].value


TESTED = [*(family for family in CLASSES if family in FAMILIES), "glm4v"]
MARKED = [pytest.param(family, marks=[] if family == "qwen3_vl" else pytest.mark.nightly) for family in TESTED]


@pytest.mark.parametrize("family", MARKED)
def test_loss_and_gradients_equal_those_without_sharing(family: str, tmp_path: Path) -> None:
    """In float64, on two ranks."""
    scenes = [name for name, media in SCENES.items() if len(media) == 2]
    if family not in FAMILIES:  # images and videos are not in one micro-batch
        scenes = [name for name in scenes if "videos" not in name]
    results = check(family, tmp_path, scenes=scenes)
    for name in MOVES & set(scenes):
        assert results[name]["moves"], name
        assert max(results[name]["patches"]) < 0.8 * sum(results[name]["patches"]), results[name]


@pytest.mark.parametrize("tuning", [pytest.param("text", marks=pytest.mark.nightly), "merger", "bf16"])
def test_a_frozen_and_a_bfloat16_tower(tuning: str, tmp_path: Path) -> None:
    """text: neither tower nor merger is trained."""
    check("qwen3_vl", tmp_path, tuning=tuning)


def test_ranks_without_anything_to_encode(tmp_path: Path) -> None:
    results = check("qwen3_vl", tmp_path, world_size=3)
    assert 0 in results["more ranks than images"]["patches"]


def test_every_family_is_tested() -> None:
    assert {"qwen2_5_omni", "qwen3_omni_moe", "glm4v_moe", "glm46v"} >= set(BY_GRID) - {*TESTED}


def test_costs_follow_the_config() -> None:
    """The cost of windows is not quadratic in the size of the image."""
    (module, _) = find_tower(make_model("qwen2_5_vl"))  # type: ignore[misc]
    windowed, frozen = (cost_of(module.config, trains_tower=trains) for trains in (True, False))
    module.config.vision_config.fullatt_block_indexes = [0, 1, 2]  # type: ignore[union-attr]
    whole = cost_of(module.config, trains_tower=True)
    assert whole[0] == 3 * windowed[0] and whole[1] < windowed[1]
    assert windowed[:2] == (3 * frozen[0], 3 * frozen[1])


# The engine is read from the model: wrapped by DDP or FSDP, or sharded at loading


class Around(nn.Module):
    """Like PEFT's: a module around a model that was sharded at loading."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.base = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))


def fsdp2() -> nn.Module:
    return fully_shard(two_layers(), mesh=init_device_mesh("cpu", (2,)))


ENGINES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "plain": ("none", two_layers),
    "ddp": ("ddp", lambda: DistributedDataParallel(two_layers())),
    "fsdp": (
        "sharded",
        lambda: FullyShardedDataParallel(two_layers(), device_id=torch.device("cpu"), use_orig_params=True),
    ),
    "fsdp2": ("sharded", fsdp2),
    "fsdp2, inside": ("sharded", lambda: Around(fsdp2())),
}


def gradient_of(model: nn.Module) -> float | None:
    """The square sum of the first gradient, over all ranks that hold a part of it; None for FSDP 1."""
    if isinstance(model, FullyShardedDataParallel):
        return None
    (first, *_) = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    whole = first.full_tensor() if hasattr(first, "full_tensor") else first
    return float(whole.double().pow(2).sum())


def report(rank: int) -> dict[str, list]:
    """By engine: its name; the gradient after a deferred backward, after one more that is reduced, and after a single
    backward of both rows."""
    reports: dict[str, list] = {}
    for name, (_, build) in ENGINES.items():
        model = build()
        reports[name] = report = [engine_of(model)]
        row = torch.full((1, 4), float(rank + 1))
        with gradients_deferred(model):
            model(row).sum().backward()
        report.append(gradient_of(model) if name == "ddp" else None)
        model(2 * row).sum().backward()
        report.append(gradient_of(model))
        model.zero_grad()
        model(torch.cat([row, 2 * row])).sum().backward()
        report.append(gradient_of(model))
    return reports


def test_engines_are_recognized_and_reduce_once(tmp_path: Path) -> None:
    """Each rank has its own gradient until the last backward, then the gradient of one backward of all rows."""
    first, second = (outcome.value for outcome in run_ranks("model.test_encoder:report", tmp_path, limit_s=120))
    assert {name: report[0] for name, report in first.items()} == {name: kind for name, (kind, _) in ENGINES.items()}
    for name in ("ddp", "fsdp2", "fsdp2, inside"):
        (*_, deferred, at_once), (*_, of_second, _) = first[name], second[name]
        assert deferred == pytest.approx(at_once, rel=1e-5) == of_second, name
    assert 4 * first["ddp"][1] == pytest.approx(second["ddp"][1])
