"""AutocastState: the same states as torch.autocast, as values."""

from __future__ import annotations

import contextlib

import pytest
import torch

from autocast_backend import AutocastState
from tests.support import BF16, FP16


def test_current_is_what_torch_says() -> None:
    assert AutocastState.current().enabled_devices == ()
    with torch.autocast("cpu", torch.float16):
        (device,) = AutocastState.current().enabled_devices
        assert (device.device_type, device.dtype) == ("cpu", torch.float16)


@pytest.mark.parametrize(
    "regions",
    [
        [BF16],
        [BF16, {"device_type": "cpu", "enabled": False}],
        [FP16, {"device_type": "cpu"}],
        [FP16, {"device_type": "cpu", "enabled": False}, {"device_type": "cpu"}],
        [BF16, {"device_type": "cpu", "cache_enabled": False}],
        [{"device_type": "cpu", "cache_enabled": False}, FP16],
    ],
)
def test_inside_regions_is_what_torch_sets(regions: list[dict]) -> None:
    """Nesting, `enabled=False`, `dtype=None` (the dtype in force) and `cache_enabled`."""
    expected_start = AutocastState.current()
    state = expected_start.inside(regions)
    with contextlib.ExitStack() as stack:
        for r in regions:
            stack.enter_context(torch.autocast(**r))  # each sees the ones before it
        assert AutocastState.current() == state
    assert AutocastState.current() == expected_start


def test_an_unsupported_dtype_switches_the_region_off_as_torch_does() -> None:
    with pytest.warns(UserWarning, match="not supported"), torch.autocast("cpu", torch.float32):
        expected = AutocastState.current().enabled_devices
    assert AutocastState.off().enter("cpu", torch.float32).enabled_devices == expected == ()


def test_a_dtype_by_its_name_is_refused() -> None:
    with pytest.raises(
        TypeError,
        match=r"^dtype: expected a torch.dtype such as torch.bfloat16, or None; got 'bfloat16'",
    ):
        AutocastState.off().enter("cpu", "bfloat16")  # type: ignore[arg-type]


def test_applied_sets_devices_that_are_not_there_and_restores() -> None:
    before = AutocastState.current()
    with AutocastState.of({"device_type": "cuda", "dtype": torch.float16}).applied():
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is torch.float16
        assert not torch.is_autocast_cache_enabled()
    assert AutocastState.current() == before


def test_applied_restores_after_an_error() -> None:
    before = AutocastState.current()
    with pytest.raises(KeyError), AutocastState.of(BF16).applied():
        raise KeyError
    assert AutocastState.current() == before


def test_of_takes_a_state_one_region_or_several() -> None:
    state = AutocastState.of([BF16, {"device_type": "cuda", "dtype": torch.float16}])
    assert [d.device_type for d in state.enabled_devices] == ["cpu", "cuda"]
    assert AutocastState.of(state) is state
    assert AutocastState.of(BF16).enabled_devices == state.enabled_devices[:1]
    assert AutocastState.of(()).enabled_devices == ()


@pytest.mark.parametrize(
    ("ambient", "error", "words"),
    [
        ({"dtype": torch.float16}, ValueError, "device_type"),
        ({"device_type": "gpu"}, ValueError, "expected one of cpu, cuda"),
        (
            {"device_type": "cpu", "dtype": torch.int8},
            ValueError,
            "torch.bfloat16 or torch.float16",
        ),
        ({"device_type": "cpu", "dtype": "bf16"}, TypeError, "torch.dtype"),
        ({"device_type": "cpu", "enable": True}, ValueError, "'enable'"),
        ({"device_type": "cpu", "enabled": 1}, TypeError, "expected a bool"),
        (["cpu"], TypeError, "dict of torch.autocast arguments"),
        ("cpu", TypeError, "ambient: expected an AutocastState, .* got 'cpu'"),
        (None, TypeError, "ambient: expected an AutocastState, .* got None"),
    ],
)
def test_bad_arguments_are_refused(ambient: object, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        AutocastState.of(ambient)  # type: ignore[arg-type]
