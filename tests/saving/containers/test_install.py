"""What saving changes in TensorFlow and Keras is there from `sok.Init` on, and not before."""

import ast
import subprocess
import sys

import pytest

pytestmark = pytest.mark.keras

_PROGRAM = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import sok_like as sok
from sok_like.runtime.framework import hooks
assert hooks.listing() == [], "nothing is wrapped before"
sok.Saver  # loads the modules of saving
assert hooks.listing() == [], "nothing is wrapped before"
sok.{start}
print([name for name, _, state in hooks.listing() if state == "in place"])
"""
_EXPECTED = (
    *("functional_saver.MultiDeviceSaver.save", "checkpoint.TrackableSaver.restore"),
    *("saving_lib.load_model", "saving_lib.load_weights_only", "saving_lib._load_state"),
    *("CheckpointSaverHook.begin", "Saver.restore", ".load_own_variables"),
)


@pytest.mark.parametrize(
    "start",
    [
        "Init(global_batch_size=8)",
        pytest.param("get_embedding_variable('table', 2)", marks=pytest.mark.keras(slow=True)),
    ],
)
def test_the_first_initialization_installs_everything(start):
    program = _PROGRAM.format(start=start)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = ast.literal_eval(done.stdout.splitlines()[-1])
    for expected in _EXPECTED:
        assert any(name.endswith(expected) for name in names), (expected, names)
