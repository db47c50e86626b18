"""The questions `fused`, `launch` and `roofline`."""

import json

import pytest
import torch

from benchmarks import fused, launch, roofline
from benchmarks.answer import Answer
from benchmarks.harness import compare


@pytest.mark.parametrize("reused", [False, True])
def test_both_forms_of_unscaling_give_the_same(reused):
    grads = [torch.randn(5, 3).half(), torch.randn(7).half()]
    functions = fused.unscale(grads, reused=reused)
    tensors, found_inf = functions["unscale_cast"]()
    results = [tensor.clone() for tensor in tensors]
    again = functions["apart"]()
    assert reused == all(a is b for a, b in zip(tensors, again, strict=True))
    for result, expected in zip(results, again, strict=True):
        assert result.dtype == torch.float32
        assert torch.equal(result, expected)
    assert found_inf.item() == 0


def test_both_forms_of_counting_give_the_same():
    x = torch.tensor([1.0, 3e38, 3.4e38, -3.4e38, 1e-45, 0.0, torch.nan, -torch.inf])
    functions = fused.stats(x)
    low, stats = functions["cast_with_stats"]()
    assert torch.equal(low.isnan(), x.isnan())
    expected_low, amax, *counts = functions["apart"]()
    assert torch.equal(low.nan_to_num(), expected_low.nan_to_num())
    assert stats.amax == amax
    assert [*map(int, stats[1:])] == [*map(int, counts)]


@pytest.mark.parametrize("only", ["stats", "unscale", "stochastic"])
def test_fused_answers(only, tmp_path, capsys):
    flags = ["--quick", "--rounds", "2", "--only", only, "--out", str(tmp_path)]
    assert fused.main(flags) == 0
    sections = json.loads((tmp_path / "fused.json").read_text())["sections"]
    assert len(sections) == (2 if only == "unscale" else 1)
    for section in sections.values():
        assert "copy" in {row["name"] for row in section["rows"]}
        assert section["bytes"] > 0
    assert only in capsys.readouterr().out


def test_launch_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "QUICK_LENGTHS", (1, 3))
    assert launch.main(["--quick", "--rounds", "2", "--out", str(tmp_path)]) == 0
    sections = json.loads((tmp_path / "launch.json").read_text())["sections"]
    assert [*sections] == [f"{n} tensors of 1024 bytes, host" for n in (1, 3)]
    assert "copy" not in {row["name"] for section in sections.values() for row in section["rows"]}


def test_launch_judges_what_a_gpu_did():
    rows = compare({"foreach out": [8.0], "multi_cast out": [2.0]}, baseline="foreach out")
    for kernels, verdict in ((0, "missed"), (1, "met"), (2, "missed")):
        answer = Answer(question="launch", settings={})
        launch._judge(148, rows, {"multi_cast out": kernels}, answer)
        found = [(target.measured, target.verdict) for target in answer.targets]
        assert found == [(str(kernels), verdict), ("4.00x", "met")]


def test_roofline_draws_single_tensors_in_order(tmp_path, capsys):
    assert roofline.main(["--out", str(tmp_path)]) == 2
    assert "benchmarks casts" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    answer = Answer(question="casts", settings={})
    names = ("copy", *roofline.SHOWN)
    for kib in (64, 1):
        rows = compare({name: [1e-6] for name in names}, baseline="copy")
        answer.add(f"1 x {kib} KiB, float32 to bfloat16", rows, bytes=kib * 1536)
        answer.add(f"150 x {kib} KiB, float32 to bfloat16", rows, bytes=1)
    answer.save(tmp_path)
    assert roofline.points(answer)["copy"] == [(1536, 1.536), (98304, 98.304)]
    assert roofline.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / "roofline.png").read_bytes()[:4] == b"\x89PNG"


def test_roofline_refuses_a_file_without_what_it_draws(tmp_path, capsys):
    answer = Answer(question="casts", settings={})
    rows = compare({name: [1e-6] for name in ("copy", ".to")}, baseline="copy")
    for title, missing in (("150 x 1 KiB", "'copy'"), ("1 x 1 KiB", "'multi_cast'")):
        answer.add(f"{title}, float32 to bfloat16", rows, bytes=1536)
        answer.save(tmp_path)
        assert roofline.main(["--out", str(tmp_path)]) == 2
        message = capsys.readouterr().err
        assert str(tmp_path / "casts.json") in message
        assert missing in message.split("got none by")[1]
    assert not (tmp_path / "roofline.png").exists()
