import json
from math import prod

import pytest
import torch

from benchmarks import cast_cost, casts
from benchmarks.cast_sets import MODELS, CastSet, cast_sets

TINY = CastSet(name="tiny", kind="small", shapes=((3, 5), (7,), ()))


def test_model_sets_have_the_parameters_of_the_models():
    assert len(MODELS["gpt2-small"]()) == 148
    assert sum(map(prod, MODELS["gpt2-small"]())) == 124_439_808  # as transformers counts them
    assert (
        sum(map(prod, MODELS["vit-b16"]())) == 86_567_656
    )  # torchvision's vit_b_16, 1,000 classes
    assert 1.2e9 < sum(map(prod, MODELS["llama-1.3b"]())) < 1.4e9


def test_single_sets_are_as_large_as_their_names():
    sets = {one.name: one for one in cast_sets(largest_kib=2**20, models=[])}
    assert 4 * sets["1 x 1 KiB"].elements == 2**10
    assert 4 * sets["1 x 1 GiB"].elements == 2**30
    assert "1 x 4 GiB" not in sets
    assert 4 * sets["150 x 16 KiB"].elements == 150 * 2**14


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float64),
    ],
)
def test_candidates_compute_the_same(source, dtype):
    functions = cast_cost.candidates(TINY, dtype, device="cpu", compiled=False, source=source)
    results = {name: function() for name, function in functions.items()}
    for name, tensors in results.items():
        if name != "copy":
            for tensor, expected in zip(tensors, results[".to"], strict=True):
                assert tensor.dtype == dtype
                assert torch.equal(tensor, expected), name
    assert all(tensor.requires_grad for tensor in results["multi_cast grad"])
    assert 2 * results["copy"].numel() == cast_cost.total_bytes(TINY, dtype, source)


@pytest.mark.slow
def test_page_faults_are_counted_where_memory_is_new():
    found = cast_cost.measure(
        CastSet(name="large", kind="single", shapes=((2**25,),)),  # 64 MiB: malloc asks for it anew
        torch.bfloat16,
        device="cpu",
        rounds=2,
        seed=0,
    )
    pages = 2**26 // 4096
    assert found.faults["multi_cast"] >= pages / 2**9  # all of them huge ones, at the least
    assert found.faults["multi_cast out"] < pages / 2**9


def test_answer_holds_rows_bytes_faults_and_verdicts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(casts, "cast_sets", lambda **_: [TINY])
    assert casts.main(["--quick", "--rounds", "2", "--out", str(tmp_path)]) == 0
    answer = json.loads((tmp_path / "casts.json").read_text())
    section = answer["sections"]["tiny, float32 to bfloat16"]
    assert section["bytes"] == 23 * 6
    assert {row["name"] for row in section["rows"]} == set(section["faults_per_call"])
    assert [target["name"] for target in answer["targets"]] == [
        "tiny: by .to",
        "tiny: by .to, out",
        "tiny: by .to, gradients on",
    ]
    assert "% of copy" in capsys.readouterr().out


def test_other_dtypes_have_a_file_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(casts, "cast_sets", lambda **_: [TINY])
    arguments = ["--quick", "--rounds", "1", "--out", str(tmp_path), "--source", "bfloat16"]
    assert casts.main([*arguments, "--dtype", "float32"]) == 0
    answer = json.loads((tmp_path / "casts-bfloat16-to-float32.json").read_text())
    assert answer["sections"]["tiny, bfloat16 to float32"]["bytes"] == 23 * 6
    with pytest.raises(SystemExit):
        casts.main(arguments)
    assert "expected two dtypes" in capsys.readouterr().err


def test_sets_that_there_are_not_are_refused_before_any_work(tmp_path, monkeypatch, capsys):
    """They left an empty answer in place of an earlier one."""
    (tmp_path / "casts.json").write_text("an earlier one")
    monkeypatch.setattr(casts, "cast_sets", lambda **_: [TINY])
    for sets in (["typo"], ["tiny", "typo"]):
        with pytest.raises(SystemExit) as exit_:
            casts.main(["--quick", "--sets", *sets, "--out", str(tmp_path)])
        assert exit_.value.code == 2
        message = "argument --sets: expected parts of the names ['tiny'], got ['typo']"
        assert message in capsys.readouterr().err
    assert (tmp_path / "casts.json").read_text() == "an earlier one"
    assert casts.main(["--quick", "--rounds", "1", "--sets", "in", "--out", str(tmp_path)]) == 0
    assert [*json.loads((tmp_path / "casts.json").read_text())["sections"]] == [
        "tiny, float32 to bfloat16"
    ]
