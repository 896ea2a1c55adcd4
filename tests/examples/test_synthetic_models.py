"""The synthetic models: their published sizes, their data, and training on 1 and 2 ranks."""

import functools
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import synthetic_data
import synthetic_models
from synthetic_config import MODELS, ModelConfig, TableGroup

import sok_like.dist_model_parallel as dmp
from tests.ready_ranks import forget

# As varied as the six, and small: shared tables and single ones, two widths, pooled columns.
SMALL = ModelConfig(
    (TableGroup(2, (1, 3), 40, 4), TableGroup(1, (1,), 300, 6), TableGroup(3, (1,), 10, 4)),
    mlp_units=(8,),
    num_numerical=5,
    pool=3,
)
SHAPES = [(table.num_rows, table.width) for table in SMALL.tables()]
BATCH, STEPS, ALPHA, RATE = 12, 3, 1.05, 0.5
# Tables and GiB of float32 rows that the models' authors give.
PUBLISHED = {
    "tiny": (55, 4.2),
    "small": (107, 26.3),
    "medium": (311, 206.2),
    "large": (612, 773.8),
    "jumbo": (1022, 3109.5),
    "colossal": (2002, 22327.4),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_their_published_sizes(name):
    tables = MODELS[name].tables()
    gib = sum(table.num_rows * table.width for table in tables) * 4 / 2**30
    assert (len(tables), round(gib, 1)) == PUBLISHED[name]
    assert MODELS.keys() == PUBLISHED.keys()


def test_inputs_of_tiny():
    inputs = MODELS["tiny"].inputs()
    # Three shared tables have two inputs each, of hotness 1 and 10.
    assert [(i.table, i.hotness) for i in inputs[:6]] == [
        (table, hotness) for table in range(3) for hotness in (1, 10)
    ]
    assert [i.table for i in inputs[6:]] == list(range(3, 55))
    assert {i.hotness for i in inputs[6:]} == {1}


def test_scaling_shrinks_rows_but_not_below_ten():
    whole, small = MODELS["tiny"].tables(), MODELS["tiny"].tables(0.05)
    for before, after in zip(whole, small, strict=True):
        assert after.width == before.width
        assert after.num_rows == max(10, before.num_rows // 20)


@pytest.mark.parametrize("alpha", [0, 0.5, 1, 1.05, 2])
def test_ids_follow_the_power_law(alpha):
    num_rows, draws = 1000, 200_000
    ids = synthetic_data.power_law(np.random.default_rng(0), alpha, num_rows, (draws // 2, 2))
    assert ids.shape == (draws // 2, 2) and ids.dtype == np.int64
    assert ids.min() >= 0 and ids.max() < num_rows
    # The density x**-alpha by the midpoint rule, in parts so small that it is exact enough.
    parts = 200
    x = 1 + (np.arange(num_rows * parts) + 0.5) / parts
    density = (x**-alpha).reshape(num_rows, parts).sum(axis=1)
    expected = density / density.sum()
    counts = np.bincount(ids.ravel(), minlength=num_rows) / draws
    for i in (0, 1, 9, 99, 999):
        # Five standard deviations of a binomial.
        assert abs(counts[i] - expected[i]) < 5 * np.sqrt(expected[i] / draws)


def test_parts_of_the_ranks_make_up_the_batch():
    batch = synthetic_data.make_batch(SMALL, 1.0, BATCH, ALPHA, 5)
    parts = [synthetic_data.part_of_rank(batch, rank, 3, None) for rank in range(3)]
    for i, ids in enumerate(batch.ids):
        np.testing.assert_array_equal(np.concatenate([part.ids[i] for part in parts]), ids)
    for field in ("numerical", "labels"):
        joined = np.concatenate([getattr(part, field) for part in parts])
        np.testing.assert_array_equal(joined, getattr(batch, field))
    some = synthetic_data.part_of_rank(batch, 1, 3, [4, 0])
    assert some.ids[0] is batch.ids[4] and some.ids[1] is batch.ids[0]
    assert len(some.labels) == BATCH // 3


def _plan(name, num_ranks):
    tables = MODELS[name].tables()
    configs = [{"input_dim": table.num_rows, "output_dim": table.width} for table in tables]
    return dmp.DistEmbeddingStrategy(configs, num_ranks).plan


def test_more_than_the_hosts_memory_is_refused(monkeypatch):
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_SIZE", raising=False)
    monkeypatch.delenv("HOROVOD_LOCAL_SIZE", raising=False)
    monkeypatch.setattr(synthetic_models, "available_bytes", lambda: 10 * 2**30)
    synthetic_models.check_memory(_plan("tiny", 1), 0, slots=1)
    with pytest.raises(SystemExit, match="would take 12.6 GiB and 10.0 GiB are free"):
        synthetic_models.check_memory(_plan("tiny", 1), 0, slots=2)
    # Each of 64 ranks has a part, of which four are on this host.
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    with pytest.raises(SystemExit, match="use a smaller --scale or more hosts"):
        synthetic_models.check_memory(_plan("large", 64), 3, slots=0)


@pytest.mark.parametrize("option", ["--batch_size=0", "--scale=-1", "--model=huge"])
def test_options_out_of_range(option, capsys):
    with pytest.raises(SystemExit):
        synthetic_models.parse_arguments([option])
    assert option.split("=")[0] in capsys.readouterr().err


def initial_values(shapes):
    rng = np.random.default_rng(7)
    return [rng.normal(0, 0.3, shape).astype(np.float32) for shape in shapes]


def train_small(dp_input):
    """Losses of this rank's parts, and the tables and the dense variables in the end."""
    model = synthetic_models.SyntheticModel(SMALL, dp_input=dp_input)
    layer = model.embeddings
    inputs = None if dp_input else layer.strategy.input_ids_list[layer.rank]
    whole = [synthetic_data.make_batch(SMALL, 1.0, BATCH, ALPHA, step) for step in range(STEPS)]
    parts = [synthetic_data.part_of_rank(w, layer.rank, layer.world_size, inputs) for w in whole]
    batches = list(map(synthetic_models.as_tensors, parts))
    model(batches[0][:2])
    layer.set_weights(initial_values(SHAPES))
    dense = [v for each in model.dense for v in each.trainable_variables]
    for variable, value in zip(dense, initial_values([v.shape for v in dense]), strict=True):
        variable.assign(value)
    step = synthetic_models.make_step(model, tf.keras.optimizers.SGD(RATE))
    losses = [float(step(*batch)) for batch in batches]
    return losses, [*layer.get_weights(all_ranks=True), *(v.numpy() for v in dense)]


def run_program(words):
    """What the program itself returns."""
    forget()  # `sok.Init`, above all
    return synthetic_models.main(words.split())


@functools.cache
def _oracle():
    """The small model in plain TensorFlow on whole batches: variables, gather, matmul."""
    tables = [tf.Variable(value) for value in initial_values(SHAPES)]
    # 8 inputs: 4 of width 4 from two tables, one of 6, three of 4; in pools of 3 columns.
    columns = 4 * 4 + 6 + 3 * 4
    features = -(-columns // 3) + SMALL.num_numerical
    dense = initial_values([(features, 8), (8,), (8, 1), (1,)])
    dense = [tf.Variable(value) for value in dense]
    losses, variables = [], [*tables, *dense]
    for number in range(STEPS):
        batch = synthetic_data.make_batch(SMALL, 1.0, BATCH, ALPHA, number)
        with tf.GradientTape() as tape:
            rows = [
                tf.reduce_sum(tf.gather(tables[each.table], ids), axis=1)
                for each, ids in zip(SMALL.inputs(), batch.ids, strict=True)
            ]
            x = tf.concat(rows, axis=1)
            # Padded by one column on each side, which an average leaves out.
            starts = range(-1, columns, 3)
            pools = [tf.reduce_mean(x[:, max(0, at) : at + 3], axis=1) for at in starts]
            x = tf.concat([tf.stack(pools, axis=1), batch.numerical], axis=1)
            x = tf.nn.relu(x @ dense[0] + dense[1]) @ dense[2] + dense[3]
            loss = tf.reduce_mean(
                batch.labels * tf.nn.softplus(-x) + (1 - batch.labels) * tf.nn.softplus(x)
            )
        losses.append(float(loss))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * tf.convert_to_tensor(gradient))
    return losses, [v.numpy() for v in variables]


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dp_input", [True, False])
def test_ranks_train_as_plain_tensorflow_does(on_threads, world_size, dp_input):
    ranks, (losses, variables) = on_threads(world_size, train_small, dp_input), _oracle()
    np.testing.assert_allclose(np.mean([own for own, _ in ranks], axis=0), losses, rtol=1e-5)
    for _, found in ranks:
        for ours, right in zip(found, variables, strict=True):
            np.testing.assert_allclose(ours, right, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_program_learns_on_two_ranks(on_processes):
    words = "--model tiny --scale 0.05 --batch_size 2048 --num_data_batches 4 --num_steps 40"
    words += " --optimizer adagrad --learning_rate 0.2"
    for program in on_processes(2, run_program, words):
        # Logits near 0 give log 2 = 0.693; then four batches are learnt by heart.
        assert 0.6 < program["first_loss"] < 0.8
        assert program["last_loss"] < 0.6
        assert program["step_seconds"] > 0
