"""What each rank does in the tests of `examples/synthetic_models.py`."""

import pathlib
import sys

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import synthetic_data
import synthetic_models
from synthetic_config import ModelConfig, TableGroup

from tests.ready_ranks import forget

# As varied as the six, and small: shared tables and single ones, two widths, pooled columns.
SMALL = ModelConfig(
    (TableGroup(2, (1, 3), 40, 4), TableGroup(1, (1,), 300, 6), TableGroup(3, (1,), 10, 4)),
    mlp_units=(8,),
    num_numerical=5,
    pool=3,
)
BATCH, STEPS, ALPHA, RATE = 12, 3, 1.05, 0.5


def initial_values(shapes):
    rng = np.random.default_rng(7)
    return [rng.normal(0, 0.3, shape).astype(np.float32) for shape in shapes]


def train_small(dp_input):
    """Losses of this rank's parts, and the tables and dense variables in the end."""
    model = synthetic_models.SyntheticModel(SMALL, dp_input=dp_input)
    layer = model.embeddings
    inputs = None if dp_input else layer.strategy.input_ids_list[layer.rank]
    batches = [
        synthetic_models.as_tensors(
            synthetic_data.part_of_rank(
                synthetic_data.make_batch(SMALL, 1.0, BATCH, ALPHA, number),
                layer.rank,
                layer.world_size,
                inputs,
            )
        )
        for number in range(STEPS)
    ]
    model(batches[0][:2])
    tables = SMALL.tables()
    values = initial_values([(table.num_rows, table.width) for table in tables])
    layer.set_weights(values)
    dense = [v for each in model.dense for v in each.trainable_variables]
    for variable, value in zip(dense, initial_values([v.shape for v in dense]), strict=True):
        variable.assign(value)
    step = synthetic_models.make_step(model, tf.keras.optimizers.SGD(RATE))
    return {
        "losses": [float(step(*batch)) for batch in batches],
        "tables": layer.get_weights(all_ranks=True),
        "dense": [v.numpy() for v in dense],
    }


def program(words):
    """What the program itself returns."""
    forget()  # `sok.Init`, above all
    return synthetic_models.main(words.split())
