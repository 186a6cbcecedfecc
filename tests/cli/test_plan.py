"""`odb-factory plan` says beforehand what a run then does, and ends in one line where it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed.rows import INVALID, row, write_uneven_rows
from llamafactory.train.tuner import run_exp
from support import run_llamafactory, training_config, write_dataset

from odb_factory.cli.main import QUIET, main
from odb_factory.demo.mm_mix import build_builtin_mix

pytestmark = pytest.mark.timeout(600)

EXAMPLE = Path(__file__).parents[2] / "examples" / "mm_mix" / "train.yaml"
NUM_ROWS = 48
POINTS = 0.02
"""What was promised. The plan of a whole epoch is the very plan of the run, so it is asked for much less."""

Plan = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command sets for its process is gone after a test."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mix")
    build_builtin_mix(folder, samples=NUM_ROWS)
    return folder


@pytest.fixture(scope="module")
def rows_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uneven_rows(tmp_path_factory.mktemp("rows"), {"texts": 48, "others": 12})


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """`plan(config, "--ranks", "2")`: the figures that it writes."""

    def plan(config: dict[str, Any], *arguments: str) -> dict[str, Any]:
        path, figures = tmp_path / "asked.yaml", tmp_path / "plan.json"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        assert main(["plan", str(path), "--json", str(figures), *arguments]) == 0
        return json.loads(figures.read_text(encoding="utf-8"))

    return plan


def example_config(tiny_vl: Path, mix: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """The example, on a CPU and without its evaluation."""
    config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    places = {"model_name_or_path": str(tiny_vl), "dataset_dir": str(mix), "output_dir": str(output)}
    return config | places | {"use_cpu": True, "eval_strategy": "no", "overwrite_cache": True} | changes


def check_prediction(planned: dict[str, Any], output: Path, within: float = 1e-9) -> dict[str, Any]:
    """The run did what was said; returns its summary."""
    summary = json.loads((output / "odb_summary.json").read_text(encoding="utf-8"))
    own = planned["own"]
    assert own["optimizer_steps"] == summary["optimizer_steps"]
    assert own["micro_steps"] == pytest.approx(summary["micro_steps"], rel=within)
    for name in ("padding_ratio", "balance"):
        assert own[name] == pytest.approx(summary[name], abs=within), name
    assert within <= POINTS
    return summary


def test_mm_mix_is_planned_as_it_is_trained_on(plan, tiny_vl, mix, tmp_path, capsys) -> None:
    config = example_config(tiny_vl, mix, tmp_path / "out")
    planned = plan(config, "--png", str(tmp_path / "plan.png"))
    shown = capsys.readouterr().out
    run_exp(config)
    summary = check_prediction(planned, tmp_path / "out")
    assert summary["micro_steps"] > summary["optimizer_steps"], "else nothing was cut"
    # The rest of what is said of it.
    assert (planned["layout"], planned["ranks"], planned["global_batch_size"]) == ("flat", 1, 16)
    (whole,) = planned["data"]
    assert whole["rows"] == whole["samples"] == NUM_ROWS and whole["patches"]["most"] > 0
    assert whole["units"]["mean"] * NUM_ROWS == pytest.approx(summary["units"])
    assert whole["tokens"]["mean"] * NUM_ROWS == pytest.approx(summary["tokens"])
    budgets = [one["token_budget"] for one in planned["budgets"]]
    assert budgets == sorted(budgets) and 4096 in budgets and len(budgets) > 4
    assert planned["own"]["speed"] > planned["fixed"]["speed"] == 1
    assert planned["other_layout"]["padding_ratio"] > 0.02
    assert "* 4,096 " in shown and "patch balance" in shown and "efficiency" in shown, "a mark, and whole headers"
    advice = planned["advice"]
    assert advice["token_budget"] in budgets and advice["max_patches"] and advice["sentence"] in " ".join(shown.split())
    assert (tmp_path / "plan.png").stat().st_size > 20_000


def test_what_each_rank_encodes_is_planned(plan, tiny_vl, mix, tmp_path, capsys) -> None:
    config = example_config(tiny_vl, mix, tmp_path / "out")
    sums, balances = [], []
    for block in ({"balance": False}, {"balance": False, "balance_encoder": True}):
        own = plan(config | {"odb": config["odb"] | block}, "--ranks", "2")["own"]
        sums.append(sum(own["encoder_patches"]))
        balances.append(own["encoder_balance"])
        shown = " ".join(capsys.readouterr().out.split())
        assert f"each rank encodes: {own['encoder_patches'][0]:,} / " in shown
    assert sums[0] == sums[1] > 0 and balances[0] < balances[1] <= 1
    assert plan(config)["own"]["encoder_patches"] is None


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["auto", "padded"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_mm_mix_grid(plan, tiny_vl, mix, tmp_path, num_ranks, layout) -> None:
    config = example_config(tiny_vl, mix, tmp_path / "out", ddp_backend="gloo")
    config["odb"] = config["odb"] | {"layout": layout}
    planned = plan(config, "--ranks", str(num_ranks))
    env = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(num_ranks)}
    done = run_llamafactory(config, env=env)
    assert done.returncode == 0, done.stdout[-3000:]
    summary = check_prediction(planned, tmp_path / "out")
    assert summary["ranks"] == num_ranks


def test_filled_optimizer_steps_are_planned_as_they_are_trained_on(plan, tiny_text, rows_dir, tmp_path) -> None:
    block = {"token_budget": 256, "global_batch_size": "fill", "layout": "padded", "buffer_size": 16}
    config = training_config(
        tiny_text, rows_dir, tmp_path / "out", dataset="texts,others", gradient_accumulation_steps=2, odb=block
    )
    planned = plan(config)
    run_exp(config)
    check_prediction(planned, tmp_path / "out")
    assert planned["global_batch_size"] is None
    assert [part["name"] for part in planned["data"]] == ["all", "texts.json", "others.json"]
    assert [part["rows"] for part in planned["data"]] == [60, 48, 12]


def test_what_is_wrong_with_the_data_is_said(plan, tiny_text, tmp_path, capsys) -> None:
    """Cut off, no supervised token, dropped by LLaMA-Factory, longer than the budget."""
    asks_only = row(3)
    asks_only["messages"][0]["content"] = "word " * 300
    write_dataset(tmp_path, {"bad": [*map(row, range(5, 40)), row(200), INVALID, asks_only]})
    block = {"token_budget": 60, "layout": "padded"}
    config = training_config(tiny_text, tmp_path, tmp_path / "out", dataset="bad", cutoff_len=200, odb=block)
    planned = plan(config, "--ranks", "8")
    (whole,) = planned["data"]
    assert whole["rows"] == 38
    assert (whole["left_out"], whole["samples"]) == ({"invalid": 1}, 37)
    assert whole["cut_off"] == 2 and whole["longest_uncut"] > 300 and whole["tokens"]["most"] == 200
    assert planned["own"]["overlong"] >= 2
    said = " ".join(planned["advice"]["warnings"])
    for what in (
        "the longest sample",
        "break the budget alone",
        "cut off at cutoff_len 200",
        "dropped by LLaMA-Factory",
    ):
        assert what in said, said
    shown = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(line.split()) in shown for line in planned["advice"]["warnings"])


def test_a_yaml_without_a_block_is_planned_with_what_stock_holds(plan, tiny_text, rows_dir, tmp_path, capsys) -> None:
    config = training_config(tiny_text, rows_dir, tmp_path / "out", cutoff_len=128, per_device_train_batch_size=4)
    planned = plan(config)
    assert not planned["has_block"] and planned["own"]["token_budget"] == 4 * 128
    assert f"odb: token_budget: {planned['advice']['token_budget']}" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "out").exists(), "a look leaves nothing behind"


def test_budgets_of_auto(plan, tiny_text, rows_dir, tmp_path, capsys) -> None:
    """`auto` needs an accelerator; the plan is made without one."""
    block = {"token_budget": "auto", "max_patches": "auto", "memory_fraction": 0.8, "layout": "padded"}
    config = training_config(tiny_text, rows_dir, tmp_path / "out", cutoff_len=128, odb=block)
    planned = plan(config | {"per_device_train_batch_size": 4})
    assert planned["own"]["token_budget"] == 4 * 128
    assert "token_budget: auto, here 512" in " ".join(capsys.readouterr().out.split())


def test_mistakes_end_in_one_line(tiny_text, rows_dir, tmp_path, capsys) -> None:
    good = training_config(tiny_text, rows_dir, tmp_path / "out", odb={"token_budget": 256})
    for name, rows in (("empty", []), ("unanswered", [INVALID] * 3)):
        (rows_dir / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    info = json.loads((rows_dir / "dataset_info.json").read_text(encoding="utf-8"))
    info |= {name: info["texts"] | {"file_name": f"{name}.json"} for name in ("empty", "unanswered")}
    (rows_dir / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    asked, tabs = tmp_path / "asked.yaml", tmp_path / "tabs.yaml"
    asked.write_text(yaml.safe_dump(good), encoding="utf-8")
    tabs.write_text("stage: sft\n\tdo_train: true\n", encoding="utf-8")
    (tmp_path / "nothing.yaml").write_text("", encoding="utf-8")
    cases: dict[tuple[str, ...], tuple[str, ...]] = {
        (str(tmp_path / "no.yaml"),): ("no.yaml", "no such file"),
        (str(tmp_path),): ("no such file",),
        (str(tabs),): ("tabs.yaml", "line 2"),
        (str(tmp_path / "nothing.yaml"),): ("holds no keys",),
        (str(asked), "do_train=false"): ("do_train", "set `do_train: true`"),
        (str(asked), "odb.token_bugdet=8"): ("odb.token_bugdet", "did you mean `token_budget`?"),
        (str(asked), "odb.token_budget=many"): ("odb.token_budget", "'many'"),
        (str(asked), "stage=ppo"): ("stage", "ppo"),
        (str(asked), "packing=true"): ("packing",),
        (str(asked), "cutoff_length=8"): ("cutoff_length",),
        (str(asked), "dataset=nowhere"): ("dataset: nowhere", "dataset_info.json"),
        (str(asked), "dataset=empty"): ("dataset: empty", "has no row"),
        (str(asked), "dataset=unanswered"): ("dataset_info.json", "unanswered"),
        (str(asked), "model_name_or_path=./nowhere"): ("there is no './nowhere'",),
        (str(asked), "--png", str(tmp_path / "no" / "plan.png")): ("there is no folder",),
    }
    for arguments, words in cases.items():
        assert main(["plan", *arguments]) == 1, arguments
        out, err = capsys.readouterr()
        line = err.splitlines()[-1]
        assert line.startswith("odb-factory plan: ") and "Traceback" not in err, err
        assert all(word in line for word in words), line
        assert "Recommended" not in out
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(asked), "--ranks", "0"])
    assert ended.value.code == 2
