import subprocess
import sys
import time

import pytest

from benchmarks import quiet
from benchmarks.machine import usable_cores
from benchmarks.quiet import Moment, wait_until_quiet

linux = pytest.mark.skipif(not quiet._STAT.exists(), reason="needs /proc/stat")


@linux
def test_own_work_is_not_the_others():
    everybody, own = Moment.now().everybody, time.process_time()
    start = Moment(everybody - 1.0, own - 1.0, time.monotonic() - 1.0)  # one second, all of it ours
    busy_others = Moment(everybody - 1.0, own, time.monotonic() - 1.0)  # and all of it others'
    assert busy_others.others_since() - start.others_since() == pytest.approx(
        1 / usable_cores(), abs=0.1
    )


@linux
def test_another_process_is_seen():
    start = Moment.now()
    code = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert start.others_since() > 0.5 / usable_cores()


def test_waiting_ends(monkeypatch):
    moments = iter([0.9, 0.4, 0.01])
    monkeypatch.setattr(Moment, "others_since", lambda self: next(moments))
    wait_until_quiet(at_most=60, watch=0.01)
    with pytest.raises(StopIteration):
        next(moments)  # it took the third for quiet, not an earlier one
    monkeypatch.setattr(Moment, "others_since", lambda self: 1.0)
    start = time.monotonic()
    wait_until_quiet(at_most=0.2, watch=0.01)
    assert 0.2 <= time.monotonic() - start < 5
