"""What three ranks trained goes on with two, after all other checks of the launch.

The first ranks then have made calls that the others have not: no check of all could follow.
"""

import numpy as np

from sok_like.runtime.ranks import comm
from tests.checks import hashed
from tests.checks.files import shared, world


def checks(world_size):
    return {"hash_tables": hash_tables} if world_size == 3 else {}


def hash_tables():
    """What three ranks trained, from files and arrays mixed, on the first two of them."""
    folder, half = shared("to_two_ranks"), hashed.train("adam")["half"]
    if comm.current().rank == 0:
        _write(folder, *half)
    comm.current().barrier()
    with world(2) as group:
        return None if group is None else set_and_get(folder)


def _write(folder, weights, state):
    cut, whole, (keys, rows) = weights
    slots = state["tables"]
    folder.mkdir(parents=True)
    np.save(folder / "cut.npy", cut)
    np.save(folder / "keys.npy", keys)
    np.save(folder / "cut_momentums.npy", slots[0]["momentums"])
    np.save(folder / "cut_velocities.npy", slots[0]["velocities"])
    hash_rows = {f"hash_{name}": array for name, (_, array) in slots[2].items()}
    np.savez(folder / "arrays.npz", whole=whole, rows=rows, **slots[1], **hash_rows)


def set_and_get(folder):
    """Weights and state from files and arrays mixed, and what comes back."""
    trainer = hashed.Trainer("whole", "adam")
    trainer.layer.build()
    trainer.optimizer.build(trainer.layer.trainable_variables)
    kept = np.load(folder / "arrays.npz")
    layer, path = trainer.layer, lambda name: str(folder / f"{name}.npy")
    layer.set_weights([path("cut"), kept["whole"], (path("keys"), kept["rows"])])
    of_hash_table = {
        name[5:]: (path("keys"), kept[name]) for name in kept.files if name.startswith("hash_")
    }
    momentums, velocities = kept["momentums"], kept["velocities"]
    tables = [
        {"momentums": path("cut_momentums"), "velocities": path("cut_velocities")},
        {"momentums": momentums, "velocities": velocities},
        of_hash_table,
    ]
    layer.set_optimizer_state(trainer.optimizer, {"iterations": 2, "tables": tables})
    state = layer.get_optimizer_state(trainer.optimizer, all_ranks=True)
    return layer.get_weights(all_ranks=True), state
