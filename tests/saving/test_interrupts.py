"""Ctrl-C and failing disks at some moments of all that writes or removes; more in `make crash`."""

import pytest

from tests import emulated
from tests.saving import interrupts

# The moments of each kind that are tried. Reading an export or a backup back takes longest.
LIMITS = {"finish": 40, "dump": 15, "delta": 10, "compact": 8, "backup": 10, "export": 2}


@pytest.mark.keras
@pytest.mark.parametrize("name", interrupts.CASES)
def test_what_was_published_stays_whole(sok, tmp_path, name):
    if emulated.asked_for():
        pytest.skip("dumps in the background and deltas are of tables in host memory")
    counts = interrupts.run(name, tmp_path / "files", LIMITS.get(name, 6))
    assert sum(counts.values()) > 6
