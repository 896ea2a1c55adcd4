"""What keeps the tests of several workers apart does not keep them from ending."""

import fcntl

from tests import cores


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
