"""What keeps the tests of several workers apart does not keep them from ending."""

import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

from tests import cores
from tests.ranks import ROOT


def test_a_share_that_is_lent_twice_is_away_until_the_first_loan_ends(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setattr(cores, "folder", lambda: tmp_path)
    monkeypatch.setattr(cores, "_held", None)
    with cores.shared(), open(tmp_path / "cores.lock", "w") as other:
        with cores.lent():
            with cores.lent():
                pass
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where it is held
            fcntl.flock(other, fcntl.LOCK_UN)
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/autogroup").exists(), reason="sessions have no priorities here"
)
@pytest.mark.parametrize("lower", [0, 5])
def test_a_run_with_a_lower_priority_gets_a_session_that_gives_way(lower):
    program = (
        "import os; from tests import cores; cores.own_session();"
        "print(os.getsid(0) == os.getpid(), open('/proc/self/autogroup').read())"
    )
    found = subprocess.check_output(
        [sys.executable, "-c", program], cwd=ROOT, preexec_fn=lambda: os.nice(lower), text=True
    )
    own, _, _, priority = found.split()
    expected = os.nice(0) + lower
    assert own == str(expected > 0)
    if expected:
        assert int(priority) == expected
