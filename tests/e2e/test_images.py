"""Image runs through the command line: pictures, logs, continued runs, other verbs, wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from PIL import Image

from lctrain import cli
from tests.support.command import column, lctrain, summary
from tests.support.images import checked, write_images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty training and eleven validation images, and where runs and shards go."""
    folder = tmp_path_factory.mktemp("image-runs")
    write_images(folder / "source")
    return folder


@pytest.fixture(scope="module")
def words(folder: Path) -> list[str]:
    """Six steps of a large-batch recipe, shrunk: 1.6 epochs of 30 images, an evaluation an epoch."""
    return [
        "recipe=resnet8_fashion_mnist_large_batch",
        "model.width=4",
        f"data.source={folder / 'source'}",
        f"data.cache={folder / 'cache'}",
        "data.image_size=8",
        "train.global_batch_size=8",
        "train.micro_batch_size=2",
        "train.max_epochs=1.6",
        "bn.ghost_size=2",
        "optim.lr=4.0",
        "schedule.warmup_epochs=0.5",
        "classification.ema_decay=0.9",
        "logging.every_steps=1",
        "logging.tensorboard=false",
        "logging.mlperf=true",
        f"logging.mlflow.uri={folder / 'mlflow'}",
        "checkpoint.save_steps=3",
        "checkpoint.save_total_limit=9",
    ]


@pytest.fixture(scope="module")
def straight(folder: Path, words: list[str]) -> Path:
    """An undisturbed run on two ranks."""
    run = folder / "straight"
    done = lctrain(*words, f"run_dir={run}", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"run dir: {run}"
    assert done.stderr == ""
    return run


@pytest.fixture(scope="module")
def continued(folder: Path, words: list[str], straight: Path) -> Path:
    """The same run from the middle of its first epoch, under another directory, with one MLflow run a rank."""
    run = folder / "continued"
    from_step = f"checkpoint.resume={straight}/checkpoints/step-3"
    done = lctrain(*words, from_step, "logging.mlflow.per_rank=true", f"run_dir={run}", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def test_a_continued_run_is_the_same_run(straight: Path, continued: Path) -> None:
    assert summary(straight)["steps"] == summary(continued)["steps"] == 6
    assert column(continued, "step") == [4, 5, 6]
    for name in ("lr", "loss", "grad_norm", "samples", "epoch"):
        assert column(continued, name) == column(straight, name)[3:], name
    assert column(straight, "lr") == [2.0, 4.0, 4.0, 2.25, 1.0, 0.25]
    assert summary(continued)["metrics"] == summary(straight)["metrics"]
    assert "ema_top1" in summary(straight)["metrics"]
    held = sum(path.stat().st_size for path in (straight.parent / "source").rglob("*") if path.is_file())
    assert summary(straight)["data"] == {"source_bytes_staged": held, "source_bytes_per_epoch": 0.0}
    assert summary(continued)["data"] == {"source_bytes_staged": 0, "source_bytes_per_epoch": 0.0}
    evaluations = [r for r in map(json.loads, (straight / "metrics.jsonl").read_text().splitlines()) if "top1" in r]
    assert [r["step"] for r in evaluations] == [4, 6]
    assert {r["eval_samples"] for r in evaluations} == {11}


def test_the_official_checker_accepts_the_logs(straight: Path, continued: Path) -> None:
    assert checked(straight) == 0
    assert checked(continued) == 0
    lines = (straight / "mlperf.log").read_text().splitlines()
    (straight / "mlperf.log").write_text("\n".join(line for line in lines if "run_stop" not in line))
    try:
        assert checked(straight) == 1
    finally:
        (straight / "mlperf.log").write_text("\n".join([*lines, ""]))


def test_mlflow_has_what_the_run_measured(folder: Path, straight: Path, continued: Path) -> None:
    from lctrain.config.root import MlflowConfig
    from lctrain.train.callbacks.mlflow import _client

    client = _client(MlflowConfig(uri=str(folder / "mlflow")))
    experiment = client.get_experiment_by_name("lctrain")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"straight", "continued-rank-0", "continued-rank-1"}

    def history(run: str, name: str) -> list[float]:
        found = sorted(client.get_metric_history(runs[run].info.run_id, name), key=lambda m: m.step)
        return [metric.value for metric in found]

    assert history("straight", "loss") == pytest.approx(column(straight, "loss"), rel=1e-12)
    assert history("straight", "top1")[-1] == summary(straight)["metrics"]["top1"]
    assert len(history("straight", "eval_loss")) == 2
    assert runs["straight"].data.params["optim.form"] == "nesterov"
    own = [history(f"continued-rank-{rank}", "loss") for rank in (0, 1)]
    assert own[0] != own[1]
    means = [sum(pair) / 2 for pair in zip(*own, strict=True)]
    assert means == pytest.approx(column(continued, "loss"), rel=1e-6)


def test_pictures(straight: Path) -> None:
    for name, size in (("samples.png", (1248, 180)), ("curves.png", (1200, 480))):
        with Image.open(straight / name) as image:
            assert (image.format, image.size) == ("PNG", size)
            assert len(image.convert("RGB").getcolors(10**6) or []) > 20


def test_evaluate_agrees_with_the_run_under_another_layout(straight: Path, folder: Path) -> None:
    done = lctrain("evaluate", f"run_dir={straight}", "parallel=single", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads((straight / "evaluate-step-6.json").read_text())
    assert told["metrics"] == pytest.approx(summary(straight)["metrics"], rel=1e-5)
    assert (told["layout"], told["world_size"], told["metrics"]["eval_samples"]) == ("single", 1, 11)
    assert summary(straight)["verb"] == "train"


@pytest.fixture
def exported(straight: Path, tmp_path: Path) -> Callable[[str], Path]:
    """The run's weights, or their moving average, as a folder."""

    @lru_cache
    def export(weights: str) -> Path:
        out = tmp_path / weights
        assert cli.main(["export", f"run_dir={straight}", f"out={out}", f"weights={weights}"]) == 0
        return out

    return export


def test_an_export_is_read_back(
    exported: Callable[[str], Path], straight: Path, words: list[str], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    out = exported("model")
    told = json.loads((out / "classifier.json").read_text())
    assert told["classes"] == [str(n) for n in range(6)]
    assert (told["model"]["depth"], told["image_size"], told["mean"]) == (8, 8, [0.286])
    tensors = load_file(str(out / "model.safetensors"))
    assert {"conv1.weight", "bn1.running_var", "layer2.0.downsample.1.weight", "fc.bias"} <= tensors.keys()
    done = lctrain(
        "evaluate", *words, f"model.path={out / 'model.safetensors'}", "classification.ema_decay=null",
        "parallel=single", f"run_dir={tmp_path / 'run'}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trained = {k: v for k, v in summary(straight)["metrics"].items() if "ema" not in k}
    assert summary(tmp_path / "run")["metrics"] == pytest.approx(trained, rel=1e-5)
    assert not [p for p in out.parent.iterdir() if p.name.startswith(".")]


def test_the_average_and_half_precision_are_exported(
    exported: Callable[[str], Path], straight: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    model, average = (load_file(str(exported(name) / "model.safetensors")) for name in ("model", "average"))
    assert model.keys() == average.keys()
    assert not torch.allclose(model["fc.weight"], average["fc.weight"])
    assert not torch.allclose(model["bn1.running_mean"], average["bn1.running_mean"])
    half = tmp_path / "half"
    assert cli.main(["export", f"run_dir={straight}", f"out={half}", "dtype=bf16"]) == 0
    tensors = load_file(str(half / "model.safetensors"))
    torch.testing.assert_close(tensors["fc.weight"], model["fc.weight"].bfloat16(), rtol=0, atol=0)
    assert tensors["bn1.num_batches_tracked"].dtype == torch.int64


def refused(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    """The one message of words the command line refuses before it starts a rank."""
    assert cli.main(list(given)) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("error: ") == 1
    return text


def test_verify_and_wrong_exports(
    straight: Path, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, "verify", *words)
    assert "verify proves attention layouts and model=resnet has no attention" in text
    text = refused(capsys, "export", f"run_dir={straight}", f"out={tmp_path / 'out'}", "weights=both")
    assert "weights=both is unknown; it is one of model, average" in text
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.yaml").write_text(
        (straight / "config.yaml").read_text().replace("ema_decay: 0.9", "ema_decay: null")
    )
    step = f"checkpoint={straight}/checkpoints/step-6"
    text = refused(capsys, "export", f"run_dir={plain}", f"out={tmp_path / 'out'}", step, "weights=average")
    assert "weights=average but" in text
    assert "train with classification.ema_decay" in text
    text = refused(capsys, "export", f"run_dir={plain}", f"out={tmp_path / 'out'}", step)
    assert "classes.json cannot be read" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["optim.form=paper"],
            ["optim.form=paper but", "trained with optim.form=nesterov", "export the checkpoint"],
        ),
        (["model.width=8"], ["another model", "width: 4 there, 8 here"]),
        (["train.global_batch_size=16"], ["train.global_batch_size=16 but", "set train.global_batch_size=8"]),
        (["model.classes=5"], ["model.classes=5 is less than the 6 classes", "leave it out"]),
        (["model.channels=3"], ["model.channels=3 but the images", "have 1", "leave it out"]),
        (["data.mean=[0.1,0.2,0.3]", "data.std=[1,1,1]"], ["has 3 numbers but the images", "have 1 channels"]),
        (["data.decode=fast"], ["data.decode=fast has no effect on the 8 x 8 pixels of", "leave it out"]),
        (
            ["data.eval_crop=0.5"],
            ["data.eval_crop=0.5 has no effect on the 8 x 8 pixels of", "data.image_size=8 takes"],
        ),
        (["model.path=none.safetensors"], ["model.path=none.safetensors cannot be read", "give a safetensors file"]),
        (["logging.mlflow.uri=/dev/null"], ["logging.mlflow.uri=/dev/null cannot be used", "give a folder"]),
        (["train.max_epochs=0.2"], ["train.global_batch_size=8 is more than the 6 images of train.max_epochs=0.2"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and "=" in value[0] and " " not in value[0] else "",
)
def test_what_the_first_rank_refuses(
    changes: list[str], said: list[str], straight: Path, words: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from lctrain.config.compose import compose_config
    from lctrain.errors import ConfigError
    from lctrain.runtime.process import Ranks
    from lctrain.worker import work

    monkeypatch.chdir(tmp_path)
    resume = f"checkpoint.resume={straight}/checkpoints/step-3"
    try:
        config = compose_config([*words, "parallel=single", resume, f"run_dir={tmp_path / 'run'}", *changes])
    except ConfigError as error:
        text = str(error)
    else:
        assert work("train", config, Ranks()) == 2
        text = capsys.readouterr().err
    assert all(part in text for part in said), text
    assert not (tmp_path / "run").exists()


def test_no_validation_images_to_evaluate_on(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from lctrain.config.compose import compose_config
    from lctrain.runtime.process import Ranks
    from lctrain.worker import work

    monkeypatch.chdir(tmp_path)
    only = tmp_path / "only"
    only.mkdir()
    for path in (folder / "source").glob("train-*"):
        shutil.copy(path, only)
    for change, said in (
        ("eval.every_epochs=1", "eval.every_epochs=1.0 but data.source="),
        ("eval.every_epochs=0", "logging.mlperf=true but data.source="),
    ):
        config = compose_config([*words, "parallel=single", f"data.source={only}", change])
        assert work("train", config, Ranks()) == 2
        text = capsys.readouterr().err
        assert said in text
        assert "give data.eval_source=PATH, or" in text
