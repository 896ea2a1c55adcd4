"""What each rank does in the tests of `dmp.DistributedEmbedding`: many checks, one launch."""

import os
import tempfile

import numpy as np
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.ranks import comm
from tests.dist_model_parallel import cases
from tests.dist_model_parallel.published_checks import old_optimizer, one_id_a_sample
from tests.dist_model_parallel.user_guide import user_guide


def make_layer(case, **kwargs):
    # Stock embeddings for tables without a combiner, so that both kinds are in one list.
    embeddings = [
        tf.keras.layers.Embedding(rows, dim)
        if combiner is None
        else sok.Embedding(rows, dim, combiner=combiner)
        for rows, dim, combiner in case.tables
    ]
    input_map = [table for table, *_ in case.inputs]
    return dmp.DistributedEmbedding(
        embeddings, input_table_map=input_map, **case.arguments, **kwargs
    )


def tensors(case, step):
    current = comm.current()
    ids = cases.batch(case, step, current.rank, current.world_size)
    return [
        cases.as_tensor(samples, kind, dtype, hotness)
        for samples, (_, kind, dtype, hotness) in zip(ids, case.inputs, strict=True)
    ]


def train(case, optimizer, graph, by_optimizer):
    layer, heads = make_layer(case), cases.make_heads(case)
    layer.set_weights(cases.table_values(case))
    opt = cases.OPTIMIZERS[optimizer]()
    if by_optimizer:
        opt = dmp.DistributedOptimizer(opt)
    variables = [*layer.trainable_variables, *(h.trainable_variables[0] for h in heads)]
    if (
        optimizer != "adam"
    ):  # which makes its state as the first step is traced, and so traces twice
        opt.build(variables)

    def step(*inputs):
        with tf.GradientTape() as tape:
            outputs = layer(list(inputs))
            loss = cases.loss_of(outputs, heads)
        if not by_optimizer:
            tape = dmp.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, variables)
        opt.apply_gradients(zip(gradients, variables, strict=True))
        return outputs

    if graph:
        signature = [cases.spec(*spec) for _, *spec in case.inputs]
        step = tf.function(step, input_signature=signature)
    outputs, shapes = [], []
    for i in range(cases.STEPS):
        found = step(*tensors(case, i))
        outputs.append([cases.flat(o).numpy() for o in found])
        shapes.append([type(o).__name__ if isinstance(o, tf.RaggedTensor) else o.shape
                       for o in found])  # fmt: skip
    return {
        "outputs": outputs,
        "shapes": [[s if isinstance(s, str) else tuple(s) for s in step] for step in shapes],
        "tables": layer.get_weights(all_ranks=True),
        "on_root": len(layer.get_weights()),
        "heads": [head.get_weights()[0] for head in heads],
        "elements": sum(int(np.prod(v.shape)) for v in layer.trainable_variables),
    }


def trainings():
    """Every placement under every optimizer; the ways to run it take turns."""
    for i, (name, case) in enumerate(cases.CASES.items()):
        for k, optimizer in enumerate(cases.optimizers(comm.current().world_size, name)):
            graph, by_optimizer = (i + k) % 2 == 0, (i + k) % 3 == 0
            yield (
                f"{name}.{optimizer}",
                lambda c=case, o=optimizer, g=graph, b=by_optimizer: train(c, o, g, b),
            )


MP_INPUTS = [*cases.INPUTS[:5], (3, "dense", "int64", 2)]  # ragged ones with a combiner only


def model_parallel(arguments, graph):
    """One step with inputs of the global batch, each on the ranks that hold its table."""
    case = cases.Case({**arguments, "dp_input": False}, inputs=MP_INPUTS)
    layer, heads = make_layer(case), cases.make_heads(case)
    layer.set_weights(cases.table_values(case))
    current = comm.current()
    # Batches of equal size, laid end to end: rank r's samples are its part of the global batch.
    of_rank = [cases.batch(case, 0, rank, 1) for rank in range(current.world_size)]
    joined = [[s for ids in of_rank for s in ids[i]] for i in range(len(case.inputs))]
    mine = layer.strategy.input_ids_list[current.rank]
    inputs = [cases.as_tensor(joined[i], *case.inputs[i][1:]) for i in mine]

    def step(inputs):
        with tf.GradientTape() as tape:
            outputs = layer(inputs)
            loss = cases.loss_of(outputs, heads)
        tape = dmp.DistributedGradientTape(tape)
        return outputs, tape.gradient(loss, layer.trainable_variables)

    outputs, gradients = (tf.function(step) if graph else step)(inputs)
    optimizer = tf.keras.optimizers.SGD(0.005)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
    seen = {
        "outputs": [cases.flat(o).numpy() for o in outputs],
        "shapes": [tuple(o.shape) for o in outputs],
        "tables": layer.get_weights(all_ranks=True),
        "errors": [],
    }
    bad = [cases.as_tensor([[99]] * len(joined[0]), *case.inputs[0][1:]) if i == 0 else x
           for i, x in zip(mine, inputs, strict=True)]  # fmt: skip
    odd = [cases.as_tensor([*joined[i], joined[i][0]], *case.inputs[i][1:]) for i in mine]
    for wrong in (bad, odd):
        try:
            layer(wrong)
            seen["errors"].append(None)
        except tf.errors.InvalidArgumentError as error:
            seen["errors"].append(error.message)
    try:
        layer([*inputs, tf.constant([[1]])])
    except ValueError as error:
        seen["count"] = str(error)
    return seen


def model_parallel_inputs():
    return {
        "basic": model_parallel({}, graph=False),
        "columns": model_parallel({"column_slice_threshold": 30}, graph=True),
    }


def idle_model_parallel():
    """A rank without a table, with model-parallel input."""
    layer = dmp.DistributedEmbedding([sok.Embedding(3, 1, combiner="sum")], dp_input=False)
    layer.set_weights([np.ones([3, 1], np.float32)])
    world_size = comm.current().world_size
    ids = tf.constant([[1, 2]] * (2 * world_size))
    with tf.GradientTape() as tape:
        (out,) = layer([ids] if layer.strategy.input_ids_list[comm.current().rank] else [])
        loss = tf.reduce_sum(out)
    tape = dmp.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, layer.trainable_variables)
    return out.numpy(), [tf.convert_to_tensor(g).numpy() for g in gradients]


def empty_constants():
    """A graph in which one rank's batch, and so all it sends, is statically empty."""
    layer = dmp.DistributedEmbedding([sok.Embedding(5, 2, combiner="sum")], row_slice_threshold=1)
    layer.set_weights([np.arange(10, dtype=np.float32).reshape(5, 2)])
    ids = np.zeros([0, 1] if comm.current().rank == 0 else [2, 1], np.int64) + 3

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            (out,) = layer([tf.constant(ids)])
            loss = tf.reduce_sum(out)
        return out, [tf.convert_to_tensor(g) for g in tape.gradient(loss, layer.trainable_weights)]

    out, gradients = step()
    return out.numpy().tolist(), float(sum(tf.reduce_sum(g) for g in gradients))


def out_of_range():
    """An id of one rank outside its table: what all ranks see, and that they can go on."""
    current, seen = comm.current(), {}
    for name, arguments in (("columns", {}), ("rows", {"row_slice_threshold": 1})):
        for bad in (7, -1):
            tables = [tf.keras.layers.Embedding(7, 2, name="items"),
                      tf.keras.layers.Embedding(9, 2, name="shops")]  # fmt: skip
            layer = dmp.DistributedEmbedding(tables, **arguments)
            call = layer if bad == 7 else tf.function(layer)
            here = current.rank == current.world_size - 1
            ids = [tf.constant([[bad if here else 1]]), tf.constant([[8]])]
            try:
                call(ids)
                message = None
            except tf.errors.InvalidArgumentError as error:
                message = error.message
            seen[f"{name} {bad}"] = message
            layer([tf.constant([[6]]), tf.constant([[8]])])
    return seen


def weights_from_files():
    """Paths and arrays mixed, chunks below a row, rank by rank; then lists that do not fit."""
    case, seen = cases.CASES["mixed"], {}
    layer = make_layer(case)
    values = cases.table_values(case)
    with tempfile.TemporaryDirectory() as folder:
        given = list(values)
        for i in (1, 3):
            given[i] = os.path.join(folder, f"{i}.npy")
            np.save(given[i], values[i])
        layer.set_weights(given, chunk=3, use_lock=True)
    seen["whole"] = all(
        np.array_equal(a, b) for a, b in zip(layer.get_weights(all_ranks=True), values, strict=True)
    )
    rank, world_size = comm.current().rank, comm.current().world_size
    last = rank == world_size - 1
    faults = {
        "short": values[:-1] if last else values,
        "long": [*values, values[0]],
        "shape": [values[0][:-1], *values[1:]] if last else values,
    }
    for name, wrong in faults.items():
        try:
            layer.set_weights([w * 0 for w in wrong])
            seen[name] = None
        except ValueError as error:
            seen[name] = str(error)
    seen["unchanged"] = all(
        np.array_equal(a, b) for a, b in zip(layer.get_weights(all_ranks=True), values, strict=True)
    )
    return seen


def initial_rows():
    """Of a table cut by rows and one by columns, with the same seeds on all ranks."""
    found = []
    for seed in (3, None):
        tf.keras.utils.set_random_seed(5)
        init = tf.keras.initializers.RandomUniform(seed=seed)
        table = tf.keras.layers.Embedding(12, 6, embeddings_initializer=init)
        for arguments in ({"row_slice_threshold": 1}, {}):
            layer = dmp.DistributedEmbedding([table], **arguments)
            found += layer.get_weights(all_ranks=True)
    return found


def marks():
    """Which variables are local, and what a broadcast does to both kinds."""
    case = cases.CASES["mixed"]
    layer, rank = make_layer(case), comm.current().rank
    layer.set_weights(cases.table_values(case))
    head = tf.keras.layers.Dense(2, kernel_initializer=tf.keras.initializers.Constant(rank + 1.0))
    head.build([None, 3])
    before = layer.get_weights(all_ranks=True)
    opt = dmp.DistributedOptimizer(tf.keras.optimizers.Adam(0.1))
    opt.build([*layer.trainable_variables, *head.trainable_variables])
    local = [dmp.is_local(v) for v in layer.weights]
    root = comm.current().world_size - 1
    slots = opt.variables() if callable(opt.variables) else opt.variables
    dmp.broadcast_variables([*layer.weights, *head.weights, *slots], root_rank=root)
    after = layer.get_weights(all_ranks=True)
    return {
        "local": local,
        "replicated": len(layer.dp_layers),
        "slots": sum(dmp.is_local(v) for v in slots),
        "kernel": float(head.get_weights()[0][0, 0]),
        "kept": all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)),
    }


class TwoLayers(tf.keras.Model):
    """Two distributed layers, one of them used twice, and a head."""

    def __init__(self, distributed=True):
        super().__init__()
        users = [tf.keras.layers.Embedding(8, 4), tf.keras.layers.Embedding(6, 4)]
        items = [sok.Embedding(9, 4, combiner="sum")]
        if distributed:
            self.users = dmp.DistributedEmbedding(users)
            self.items = dmp.DistributedEmbedding(items, row_slice_threshold=1)
        self.head = tf.keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        a, b = self.users([inputs[:, 0:1], inputs[:, 1:2]])
        (c,) = self.items([inputs[:, 2:4]])
        (d,) = self.items([inputs[:, 4:6]])
        return self.head(tf.concat([a[:, 0], b[:, 0], c, d], 1))


def fit_data(rank, steps=4, local_batch=4):
    rng = np.random.default_rng([11, rank])
    x = rng.integers(0, 6, [steps * local_batch, 6])
    return x.astype(np.int64), rng.normal(size=[steps * local_batch, 1]).astype(np.float32)


def fit_tables():
    rng = np.random.default_rng(12)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((8, 4), (6, 4), (9, 4))]


def fit():
    """compile/fit on different data on each rank."""
    model = TwoLayers()
    tables = fit_tables()
    model.users.set_weights(tables[:2])
    model.items.set_weights(tables[2:])
    x, y = fit_data(comm.current().rank)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True)
    optimizer = dmp.DistributedOptimizer(tf.keras.optimizers.Adam(0.05))
    model.compile(optimizer, loss="mse")
    callback = dmp.BroadcastGlobalVariablesCallback(0)
    model.fit(dataset, epochs=2, verbose=0, callbacks=[callback])
    return {
        "tables": model.users.get_weights(all_ranks=True) + model.items.get_weights(all_ranks=True),
        "head": model.head.get_weights(),
    }


def constrained():
    """Tables that were cut in two ways, or left whole, after a step without gradients."""
    given = {
        "by columns": (tf.keras.constraints.MaxNorm(0.5), {}),
        "by rows": (tf.keras.constraints.UnitNorm(axis=1), {"row_slice_threshold": 1}),
        "whole": (tf.keras.constraints.UnitNorm(axis=1), {}),
    }
    found = {}
    for name, (constraint, arguments) in given.items():
        table = tf.keras.layers.Embedding(6, 4, embeddings_constraint=constraint)
        layer = dmp.DistributedEmbedding([table], **arguments)
        layer.build(None)
        layer.set_weights([CONSTRAINED])
        pairs = [(tf.zeros_like(v), v) for v in layer.trainable_variables]
        dmp.DistributedOptimizer(tf.keras.optimizers.SGD(1.0)).apply_gradients(pairs)
        sizes = [int(np.prod(variable.shape)) for variable in layer.trainable_variables]
        found[name] = (layer.get_weights(all_ranks=True)[0], sum(sizes))
    return found


CONSTRAINED = np.arange(24, dtype=np.float32).reshape(6, 4) / 10


def checks():
    yield from trainings()
    if comm.current().world_size > (3 if os.environ.get("SLOW") else 2):
        return  # what differs with so many ranks is the exchange
    for check in (
        model_parallel_inputs,
        idle_model_parallel,
        empty_constants,
        out_of_range,
        weights_from_files,
        initial_rows,
        marks,
        fit,
        old_optimizer,
        one_id_a_sample,
        constrained,
        user_guide,
    ):
        yield check.__name__, check
