"""A server in a process of stock TensorFlow that follows a training: `python follower.py FOLDER`.

Takes each SavedModel and delta below FOLDER/models and writes its answers to FOLDER/answers, one
line of JSON each, until FOLDER/end exists and nothing is left.
"""

import json
import pathlib
import sys
import time

import numpy as np
import tensorflow as tf


def follow(folder):
    keys = tf.constant(np.load(folder / "keys.npy"))
    version, loaded, taken = 0, None, set()
    while True:
        ends = (folder / "end").exists()
        models = [int(p.name) for p in (folder / "models").glob("*") if p.name.isdigit()]
        done = True
        if max(models, default=0) > version:
            version, taken, done = max(models), set(), False
            loaded = tf.saved_model.load(str(folder / "models" / str(version)))
        for file in sorted((folder / "models" / f"{version}.deltas").glob("*.index")):
            if file.stem not in taken:
                try:
                    loaded.signatures["refresh"](delta=tf.constant(file.stem))
                except tf.errors.OpError:
                    break  # a new SavedModel has replaced the deltas
                taken.add(file.stem)
                done = False
        if not done:
            (answer,) = loaded.signatures["serving_default"](keys=keys).values()
            line = {"version": version, "deltas": len(taken), "answer": answer.numpy().tolist()}
            with open(folder / "answers", "a") as file:
                print(json.dumps(line), file=file)
        if ends and done:
            return
        time.sleep(0.02)


if __name__ == "__main__":
    follow(pathlib.Path(sys.argv[1]))
