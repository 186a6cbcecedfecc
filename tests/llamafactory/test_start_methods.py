"""Trainings whose workers are not forked: the same training, evaluation included."""

from __future__ import annotations

from typing import Any

import pytest
from support import RUN_TIMEOUT_S, read_log, run_llamafactory, shimmed, training_config


@pytest.mark.nightly
@pytest.mark.timeout(3 * RUN_TIMEOUT_S + 60)
def test_spawn_and_forkserver_train_as_fork_does(tiny_vl, data_dir, tmp_path) -> None:
    """I6. The collator holds a model that no pickle can take, and is sent to the workers of the evaluation, too."""
    logs: dict[str, Any] = {}
    for method in ("fork", "spawn", "forkserver"):
        config = training_config(
            tiny_vl,
            data_dir,
            tmp_path / method,
            dataset="texts,pictures",
            gradient_accumulation_steps=2,
            eval_dataset="texts",
            eval_strategy="epoch",
            odb={"token_budget": 1536, "max_patches": 900, "buffer_size": 24},
        )
        done = run_llamafactory(config, env=shimmed("start_method") | {"ODB_TEST_START_METHOD": method})
        assert done.returncode == 0, done.stdout[-3000:]
        logs[method] = [
            (entry.get("loss"), entry.get("grad_norm"), entry.get("eval_loss")) for entry in read_log(tmp_path / method)
        ]
    assert logs["spawn"] == logs["forkserver"] == logs["fork"]
    assert any(eval_loss for _, _, eval_loss in logs["fork"])
