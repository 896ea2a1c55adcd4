"""The example programs on 2 ranks, all in one launch."""

import functools
import os

import pytest

from tests import cores
from tests.ranks import RanksFailed, once_per_run

SERVED = "served"  # folder of the model that `serve_flights.py` trains
FLIGHTS = ["--rows", "40000", "--batch-size", "512", "--embedding-dim", "4"]
SYNTHETIC = (
    "--model tiny --scale 0.05 --batch_size 2048 --num_data_batches 4 --num_steps 40"
    " --optimizer adagrad --learning_rate 0.2"
)


@functools.cache
def _results():
    programs = {
        "keras_model_parallel": ["--samples", "200", "--epochs", "2"],
        "two_tower": ["--epochs", "3"],
        "group_columns": [*FLIGHTS, "--optimizer", "adagrad"],
        "serve_flights": [
            *("--train", "--rows", "20000", "--every", "2"),
            *("--folder", str(cores.folder() / SERVED)),
        ],
    }
    if os.environ.get("SLOW"):
        programs["movielens"] = ["--epochs", "1"]
        programs["sasrec"] = ["--epochs", "3", "--folder", str(cores.folder() / "sasrec")]
    args = {"programs": programs, "synthetic": SYNTHETIC.split()}
    # Horovod makes groups of ranks where the first to start it has asked for them.
    groups = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    return once_per_run("examples", "tests.examples.on_ranks:run", 2, args, groups)


@pytest.fixture(scope="session")
def on_two_ranks():
    """`on_two_ranks(name)`: for each rank what the program of that name printed."""

    def outputs(name):
        ranks = _results()
        if isinstance(ranks, RanksFailed):
            pytest.fail(str(ranks), pytrace=False)
        found = [rank[name] for rank in ranks]
        errors = [text for text in found if isinstance(text, str) and "Traceback" in text]
        assert not errors, errors[0]
        return found

    return outputs
