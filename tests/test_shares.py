"""``--share``, with which CI takes some of the tests."""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import _share, pytest_collection_modifyitems

SLOW = [f"tests/test_a.py::test_slow_{i}" for i in range(30)]
MANY = [f"tests/test_a.py::test_many[{i}]" for i in range(30)]
FEW = [f"tests/test_a.py::test_few[{i}]" for i in range(4)]


def taken(share: str | None) -> list[str]:
    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config: Any = SimpleNamespace(getoption={"--share": share}.get, hook=hook)
    items: list[Any] = [
        SimpleNamespace(nodeid=name, get_closest_marker={"slow": name in SLOW}.get)
        for name in [*SLOW, *MANY, *FEW]
    ]
    together = list(items)
    pytest_collection_modifyitems(config, items)
    assert [item for item in together if item not in left_out] == items
    return [item.nodeid for item in items]


def test_each_test_is_in_one_share_and_what_is_quick_in_all() -> None:
    assert taken(None) == taken("1/1") == [*SLOW, *MANY, *FEW]
    shares = [taken(f"{share}/3") for share in (1, 2, 3)]
    assert all(
        0 < sum(name in names for name in share) < 30 for share in shares for names in (SLOW, MANY)
    )
    together = [name for share in shares for name in share]
    assert sorted(together) == sorted([*SLOW, *MANY, *3 * FEW])


@pytest.mark.parametrize("share", ["", "1", "0/3", "4/3", "-1/3", "1/3/3", "a/b"])
def test_no_share(share: str) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError, match=f"K from 1 to N, such as 1/3, got '{share}'"
    ):
        _share(share)
