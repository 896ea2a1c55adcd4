"""The feature column example on a part of the flights: it trains, and better than by chance."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "group_columns.py"
ARGUMENTS = ["--rows", "40000", "--batch-size", "512", "--embedding-dim", "4"]


def run(command):
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return float(re.search(r"test AUC +(\S+)", done.stdout)[1])


def test_ftrl_and_adagrad_learn():
    # 0.5 is chance. On so few flights most dates and crosses are seen a few times only.
    assert run([sys.executable, str(PROGRAM), *ARGUMENTS]) > 0.65


@pytest.mark.ranks
def test_two_ranks_train_the_same_model():
    alone = run([sys.executable, str(PROGRAM), *ARGUMENTS, "--optimizer", "adagrad"])
    launcher = [sys.executable, "-m", "sok_like.run", "-np", "2", str(PROGRAM), *ARGUMENTS]
    together = run([*launcher, "--optimizer", "adagrad"])
    assert alone > 0.65
    # Initial rows and batches are the same; only the rounding of sums differs.
    assert abs(alone - together) < 0.005
