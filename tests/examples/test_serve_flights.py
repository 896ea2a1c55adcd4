"""`examples/serve_flights.py`: trained on 2 ranks, served by a process without the package."""

import json
import pathlib
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from tests import forks
from tests.ranks import HANG_LIMIT, ROOT

PROGRAM = pathlib.Path(ROOT, "examples", "serve_flights.py")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

pytestmark = pytest.mark.ranks

# Runs the program where importing the package fails.
ALONE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("sok_like", "flights_data", "flights_model"):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(on_two_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    first, _ = on_two_ranks("serve_flights", "--folder", str(folder))
    assert "served from" in first
    # Deltas come later, as if training took longer than the start of the server.
    (folder / "model" / "1.deltas").rename(folder / "later")
    return folder


@pytest.fixture(scope="module")
def address(folder):
    command = forks.command("-c", ALONE, PROGRAM, "--folder", folder, "--port", 0)
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", line), line
        yield line
    finally:
        server.kill()
        server.wait()


def get(url):
    with urllib.request.urlopen(url, timeout=HANG_LIMIT) as reply:
        return reply.read().decode()


def test_requests(folder, address):
    names = json.loads(get(f"{address}/flights"))
    assert len(names) == 200 and all(" to " in name for name in names)
    answers = [json.loads(get(f"{address}/predict?flight={i}")) for i in range(0, 200, 20)]
    found = np.array([answer["probability"] for answer in answers])
    assert [answer["flight"] for answer in answers] == names[::20]
    assert ((found > 0) & (found < 1)).all() and len(set(found)) == len(found)
    assert "<select" in get(f"{address}/")
    for path, status in (("predict?flight=200", 400), ("predict?flight=-1", 400), ("x", 404)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(f"{address}/{path}")
        assert refused.value.code == status


def test_the_page_shows_a_probability(address):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs Chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    page = subprocess.run(
        [*command, "--virtual-time-budget=20000", f"{address}/"],
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    ).stdout
    answer = json.loads(get(f"{address}/predict?flight=0"))
    assert f"{round(100 * answer['probability'])} % over 15 minutes late" in page
    assert page.count("<option") == 200


def test_the_answers_change_while_the_model_is_trained_on(folder, address):
    """Last, for it lets the server have the deltas."""
    answers = [[probability_of(address, i) for i in range(0, 200, 20)]]
    names = sorted(file.stem for file in (folder / "later").glob("*.index"))
    assert len(names) >= 2
    (folder / "model" / "1.deltas").mkdir()
    for name in names:
        for file in sorted((folder / "later").glob(f"{name}.*")):  # the index last
            file.rename(folder / "model" / "1.deltas" / file.name)
        until = time.monotonic() + HANG_LIMIT
        while (now := [probability_of(address, i) for i in range(0, 200, 20)]) == answers[-1]:
            assert time.monotonic() < until, f"delta {name} changes no answer"
            time.sleep(0.05)
        answers.append(now)


def probability_of(address, flight):
    return json.loads(get(f"{address}/predict?flight={flight}"))["probability"]
