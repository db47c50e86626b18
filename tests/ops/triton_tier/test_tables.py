"""Tables of tensors, and when one is kept."""

import contextlib
import threading

import pytest
import torch

from autocast_backend._torch.tensors import write_numbers
from autocast_backend.ops.triton import tables
from autocast_backend.ops.triton.tables import Row

CPU = torch.device("cpu")


def test_layout() -> None:
    rows = [Row(9, 100, 200), Row(8, 300, 400, 7), Row(1, 500, 600), Row(17, 700, 800)]
    numbers, tiles = tables.layout(rows, 8)
    assert torch.tensor(numbers).view(4, 5).tolist() == [
        [0, 9, 100, 200, 0],
        [2, 8, 300, 400, 7],
        [3, 1, 500, 600, 0],
        [4, 17, 700, 800, 0],
    ]
    assert tiles == 7


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_written_by_arguments(count: int) -> None:
    """Addresses and counters have up to 64 bits, and all of them arrive."""
    numbers = [(2**63 - 1 - i) * (-1) ** i for i in range(count)]
    table = torch.full((count,), 7)
    write_numbers(table, numbers)
    assert table.tolist() == numbers


def test_a_captured_table_is_never_a_kept_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what would be captured is written on the CPU."""

    class Device:
        type = "cuda"

    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: real(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(tables, "_kept", lambda *_: pytest.fail("kept while capturing"))
    first, second = (tables.on_device((1, 2**60 + 1), Device()) for _ in range(2))  # type: ignore
    assert first.tolist() == second.tolist() == [1, 2**60 + 1]
    assert first.data_ptr() != second.data_ptr()


def test_one_table_for_calls_with_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU first, whatever the default device is, and in a thread that has no pool."""
    made, threads = [], set()

    def tensor(numbers: tuple[int, ...], **options: object) -> torch.Tensor:
        made.append((numbers, options["pin_memory"], options["device"]))
        threads.add(threading.get_ident())
        return torch.ones(1)

    monkeypatch.setattr(tables.torch, "tensor", tensor)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    tables._kept.cache_clear()
    for stream in (1, 2):
        for numbers in ((3,), (4,), (3,)):
            tables._kept(numbers, CPU, stream)  # type: ignore[arg-type]
    assert made == [((number,), True, "cpu") for number in (3, 4)] * 2
    assert threading.get_ident() not in threads
    for number in range(2 * tables.TABLES_KEPT):
        tables._kept((number,), CPU, 1)  # type: ignore[arg-type]
    assert tables._kept.cache_info().currsize == tables.TABLES_KEPT
    tables._kept.cache_clear()
