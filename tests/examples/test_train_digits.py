"""The demo runs, writes what it promises, and its rows are comparable."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import EXAMPLES

for package in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(package)

STEPS = 4
SMALL = ["--epochs", "1", "--train-images", "128", "--batch-size", "32", "--inner", "aot_eager"]


def run_demo(out: Path, *arguments: str) -> dict[str, Any]:
    program = str(EXAMPLES / "train_digits.py")
    result = subprocess.run(
        [sys.executable, program, *SMALL, "--out", str(out), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((out / "results.json").read_text())
    for row in report["rows"].values():
        assert row["label"] in result.stdout
        assert 0 <= row["accuracy"] <= 1
        assert row["seconds_per_step"] > 0
        assert row["first_step_seconds"] > 0
        assert len(row["losses"]) == STEPS
        assert all(map(math.isfinite, row["losses"]))
    return report


def test_writes_the_table_and_the_curves(tmp_path: Path) -> None:
    report = run_demo(tmp_path, "--device", "cpu", "--rows", "fp32", "autocast", "smart_autocast")
    fp32, autocast, smart = (report["rows"][row] for row in ("fp32", "autocast", "smart_autocast"))
    assert list(report["rows"]) == ["fp32", "autocast", "smart_autocast"]
    assert {"cpu", "cores", "gpu", "torch", "python", "system"} == set(report["machine"])
    assert report["settings"]["dtype"] == "bfloat16"
    assert fp32["casts_per_step"] == 0
    assert autocast["casts_per_step"] > 0
    assert smart["casts_per_step"] == autocast["casts_per_step"]
    assert smart["losses"] == autocast["losses"]  # bit by bit
    assert fp32["losses"] != autocast["losses"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_trains_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    report = run_demo(
        tmp_path, "--device", "cuda", "--dtype", dtype, "--rows", "autocast", "smart_autocast"
    )
    assert report["machine"]["gpu"] == torch.cuda.get_device_name()


@pytest.mark.slow
def test_float16_trains_with_a_scaled_loss_on_the_cpu(tmp_path: Path) -> None:
    report = run_demo(tmp_path, "--device", "cpu", "--dtype", "float16", "--rows", "smart_autocast")
    assert report["settings"]["dtype"] == "float16"


def test_held_out_images_are_never_trained_on() -> None:
    import train_digits

    digits = train_digits.load_digits("cpu")
    assert len(digits.train_labels) + len(digits.test_labels) == 1797
    images = torch.cat([digits.train_images, digits.test_images])
    assert images.shape == (1797, 1, 8, 8)
    assert len(images.unique(dim=0)) == 1797
    assert torch.equal(digits.test_images, train_digits.load_digits("cpu").test_images)


def test_too_few_steps_are_refused() -> None:
    import train_digits

    settings = train_digits.Settings(
        epochs=1,
        batch_size=64,
        train_images=64,
        device="cpu",
        dtype="bfloat16",
        inner="inductor",
        threads=torch.get_num_threads(),  # it sets them, for this process
        seed=0,
    )
    with pytest.raises(ValueError, match="at least 2 training steps; got 1 from 64 images"):
        train_digits.Training(train_digits.ROWS["fp32"], settings)
