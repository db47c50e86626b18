"""Flags that cannot be are refused by name, before any work."""

import importlib

import pytest

from benchmarks.__main__ import QUESTIONS, main

MODULES = {name: importlib.import_module(f"benchmarks.{name}") for name in QUESTIONS}


def _flags_of(question):
    return MODULES[question].parser()._actions


COUNTS = [
    (question, flag.option_strings[0])
    for question in QUESTIONS
    for flag in _flags_of(question)
    if flag.option_strings[0]
    in {"--rounds", "--warm-rounds", "--trials", "--tokens", "--threads", "--layers", "--largest"}
]


def _refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("question", "flag"), COUNTS)
def test_what_is_counted_is_one_at_the_least(question, flag, capsys):
    """0 rounds were the default ones, 0 tokens a division by zero after all had been compiled."""
    for value in ("0", "-3", "1.5", "many"):
        message = _refused([question, f"{flag}={value}"], capsys)
        assert f"argument {flag}: expected a whole number, 1 or more, got '{value}'" in message
    parsed = vars(MODULES[question].parser().parse_args([flag, "2"]))
    assert parsed[flag.removeprefix("--").replace("-", "_")] == 2


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_other_flag_is_any_number(question):
    numbers = [flag.option_strings for flag in _flags_of(question) if flag.type is int]
    assert numbers in ([], [["--seed"]])


@pytest.mark.parametrize("question", [name for name in QUESTIONS if name != "gpu"])
def test_a_gpu_is_asked_for_where_there_is_none(question, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = _refused([question, "--device", "cuda"], capsys)
    assert "argument --device: expected a CUDA device, got none: torch" in message


def test_a_picture_of_a_gpu_is_drawn_without_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["roofline", "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert f"no {tmp_path}" in capsys.readouterr().err
