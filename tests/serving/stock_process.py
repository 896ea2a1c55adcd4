"""A process that has no sok_like: loads SavedModels and writes what they compute.

    python stock_process.py FOLDER ...

Each folder holds a SavedModel and `inputs.npz`, and gets `outputs.npz`: by `tf.saved_model.load`
("v2") and by the loader of TensorFlow 1 ("v1"), both by the name of the signature. If there is a
folder of deltas beside it, the model is refreshed by them first.
"""

import importlib.abc
import pathlib
import sys

import numpy as np


class Refuse(importlib.abc.MetaPathFinder):
    """Importing the package fails, wherever it may be installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("sok_like", "horovod"):
            raise ImportError(f"{name} is not here")
        return None


def run(folder):
    import tensorflow as tf

    # The session has its own, as in a server.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    inputs = dict(np.load(folder / "inputs.npz"))
    inputs = {k: v.astype(object) if v.dtype.kind == "S" else v for k, v in inputs.items()}
    deltas = sorted(path.stem for path in folder.with_name(f"{folder.name}.deltas").glob("*.index"))
    loaded = tf.saved_model.load(str(folder))
    for delta in deltas:
        loaded.signatures["refresh"](delta=tf.constant(delta))
    function = loaded.signatures["serving_default"]
    (v2,) = function(**{name: tf.constant(value) for name, value in inputs.items()}).values()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(folder))
        for delta in deltas:
            signature = meta.signature_def["refresh"]
            session.run(signature.outputs["version"].name, {signature.inputs["delta"].name: delta})
        signature = meta.signature_def["serving_default"]
        feed = {signature.inputs[name].name: value for name, value in inputs.items()}
        (output,) = signature.outputs.values()
        v1 = session.run(output.name, feed)
    np.savez(folder / "outputs.npz", v2=v2.numpy(), v1=v1)


def main():
    sys.meta_path.insert(0, Refuse())
    try:
        import sok_like  # noqa: F401
    except ImportError:
        pass
    else:
        raise AssertionError("sok_like can be imported")
    for folder in sys.argv[1:]:
        run(pathlib.Path(folder))


if __name__ == "__main__":
    main()
