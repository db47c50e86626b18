"""docs/coverage.md is what the conformance calls and real architectures give."""

from __future__ import annotations

import pytest

from tests.conformance import coverage
from tests.conformance.architectures import ARCHITECTURES, Architecture, count
from tests.conformance.one_call import NO_KERNEL, PINNED
from tests.support import BF16


@pytest.mark.usefixtures("autocast_without_device")
@pytest.mark.skipif(not PINNED, reason="the page was written with another torch")
@pytest.mark.skipif(bool(NO_KERNEL), reason="the page was written where all ops have kernels")
def test_what_is_not_lowered() -> None:
    page = coverage.PAGE.read_text()
    for name, found in (
        ("registrations", coverage.registrations()),
        ("not lowered", coverage.not_lowered()),
    ):
        assert coverage.section(page, name) == found
        assert len(found) > 10


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.model)
def test_an_architecture_is_lowered(architecture: Architecture) -> None:
    """At least 99 of 100 calls that need a cast, and as many as the page says."""
    transformers = pytest.importorskip("transformers")
    found = count(architecture, BF16)
    assert found.lowered >= 10
    assert found.share >= 0.99, found.bracketed
    written = coverage.section(coverage.PAGE.read_text(), "architectures")
    if PINNED and transformers.__version__ in written[-1]:
        assert coverage.row_of(architecture.kind, architecture.model, found) in written
