"""`examples/serve_flights.py`: trained on 2 ranks, served by a process without the package."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest

from tests.ranks import ROOT, run_ranks

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
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    first, _ = run_ranks(
        PROGRAM, 2, args=["--train", "--rows", "20000", "--folder", str(place)], timeout=600
    )
    assert "served from" in first
    return place


@pytest.fixture(scope="module")
def address(folder):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE, str(PROGRAM), "--folder", str(folder), "--port", "0"]
    server = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        line = server.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", line), line
        yield line
    finally:
        server.kill()
        server.wait()


def get(url):
    with urllib.request.urlopen(url, timeout=60) as reply:
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
        timeout=120,
    ).stdout
    answer = json.loads(get(f"{address}/predict?flight=0"))
    assert f"{round(100 * answer['probability'])} % over 15 minutes late" in page
    assert page.count("<option") == 200
