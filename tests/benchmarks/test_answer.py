import argparse
import json
from pathlib import Path

import pytest

from autocast_backend._native import DeviceTier
from autocast_backend.ops import KERNEL_TIER
from benchmarks.answer import Answer, table, text_table
from benchmarks.harness import compare
from benchmarks.machine import machine_facts, machine_slug


def _answer():
    answer = Answer(question="example", settings={"rounds": 3})
    rows = compare({"stock": [1.0, 2.0, 3.0], "ours": [2.0, 3.0, 4.0]}, baseline="stock")
    answer.add("speed", rows, note="a fact")
    answer.judge("ratio", goal="<= 1", measured="1.5", met=False)
    return answer, rows


def test_json_round_trip(tmp_path):
    answer, rows = _answer()
    path = answer.save(tmp_path / "deep")
    assert path == tmp_path / "deep" / "example.json"
    again = Answer.load(path)
    assert again == answer
    speed = again.sections["speed"]
    assert speed["note"] == "a fact"
    assert speed["rows"][1]["samples"] == rows[1].samples
    assert speed["rows"][1]["ratio"] == rows[1].ratio
    assert again.targets[0].verdict == "missed"


def test_results_are_kept_by_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.answer.RESULTS", tmp_path)
    path = _answer()[0].save()
    assert path == tmp_path / machine_slug() / "example.json"


CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: {family}
model\t\t: 17
model name\t: {name}
"""


@pytest.mark.parametrize(
    ("name", "family", "capability", "expected"),
    [
        ("AMD EPYC", 25, "AVX2", "amd-epyc-family-25-avx2-2-cores"),
        ("AMD EPYC", 25, "AVX512", "amd-epyc-family-25-avx512-2-cores"),
        ("AMD EPYC", 26, "AVX512", "amd-epyc-family-26-avx512-2-cores"),
        ("Intel(R) Xeon(R) Processor", 6, "AVX512", "intel-xeon-family-6-avx512-2-cores"),
        ("AMD EPYC 9554 64-Core Processor", 25, "AVX512", "amd-epyc-9554-avx512-2-cores"),
    ],
)
def test_processors_whose_number_is_hidden_are_told_apart(
    monkeypatch, name, family, capability, expected
):
    """EPYCs of three generations have one name in a virtual machine."""
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "read_text", lambda _: CPUINFO.format(name=name, family=family))
    monkeypatch.setattr("benchmarks.machine.usable_cores", lambda: 2)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert machine_slug() == expected


def test_the_machine_is_written_beside_the_numbers(tmp_path):
    machine = json.loads(_answer()[0].save(tmp_path).read_text())["machine"]
    for fact in ("cpu", "cores", "threads", "os", "python", "torch", "date"):
        assert machine[fact], f"{fact} is missing"
    assert {"load_average", "load_average_after", "gpu", "revision", "triton"} <= machine.keys()


def test_the_kernels_that_ran_are_written_beside_the_numbers(tmp_path, monkeypatch):
    tier = DeviceTier("triton", "the CUDA library is not built")
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setitem(KERNEL_TIER.devices, "cuda", tier)
    monkeypatch.delenv("SMART_AUTOCAST_KERNELS", raising=False)
    answer, _ = _answer()
    answer.device = "cuda"
    machine = json.loads(answer.save(tmp_path).read_text())["machine"]
    assert machine["kernels"] == "triton: the CUDA library is not built"


def test_numbers_of_other_kernels_than_were_asked_for_are_refused(monkeypatch):
    tier = DeviceTier("reference", "the CUDA library is not built")
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setitem(KERNEL_TIER.devices, "cuda", tier)
    monkeypatch.setenv("SMART_AUTOCAST_KERNELS", "native")
    with pytest.raises(RuntimeError, match=r"expected native kernels on cuda, .* got reference: "):
        Answer.to("casts", argparse.Namespace(device="cuda"))


def test_revision_is_none_outside_git(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.machine._ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine_facts()["revision"] is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AMD EPYC AVX512 2 cores", "amd-epyc-avx512-2-cores"),
        ("AMD EPYC 9554 64-Core Processor 8 cores", "amd-epyc-9554-8-cores"),
        ("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz 4 cores", "intel-xeon-e5-2680-v4-4-cores"),
        ("NVIDIA H200", "nvidia-h200"),
    ],
)
def test_slug(name, expected):
    from benchmarks.machine import _slug

    assert _slug(name) == expected


def test_table_scales_to_its_unit():
    rows = compare({"stock": [1e-6], "ours": [3e-6]}, baseline="stock")
    last = table(rows, unit="us").splitlines()[-1].split()
    assert last == ["ours", "3.00", "3.00", "3.00", "3.000", "+2.00", "1"]


def test_text_table_aligns_columns():
    assert text_table(["a", "bb"], [["long", "1"], ["x", "100"]]) == (
        "a      bb\nlong    1\nx     100"
    )
