"""The question about rounding."""

import json

import pytest
import torch

from benchmarks import rounding


def test_elements_that_differ_are_counted():
    expected = [torch.zeros(3), torch.zeros(2, 2)]
    found = [torch.tensor([0.0, 1.0, 0.0]), torch.ones(2, 2)]
    assert rounding.differing(found, expected) == 5 / 7
    with pytest.raises(ValueError, match="zip"):
        rounding.differing(found[:1], expected)


@pytest.mark.slow
def test_a_case_is_measured_judged_and_kept(tmp_path):
    only = ["--quick", "--only", rounding.WORST, "gated", "--rounds", "1", "--out", str(tmp_path)]
    assert rounding.main(only) == 0
    kept = json.loads((tmp_path / "rounding.json").read_text())
    assert kept["complete"]
    worst, gated = (kept["sections"][name]["differing"] for name in (rounding.WORST, "gated"))
    assert worst["eager"] == worst["rounded"] == 0 < worst["not rounded"]
    assert gated["rounded"] < 0.01 < gated["not rounded"]
    assert [target["name"] for target in kept["targets"]] == ["gated: rounded by not rounded"]
