"""W1 and W2: a training step is lookup, gradient and update.

Every contender gets the same upstream gradient instead of a loss, so they differ in the embedding
only. Our tables and the peers' hash tables hold all keys before the first step.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

import sok_like as sok
from benchmarks import workloads
from benchmarks.harness import Contender, Match
from sok_like.lookup import hash_lookup as group_lookup

RATE = 0.01
OURS, GROUP = "ours", "ours, 26 tables"
EVALUATION = "ours, evaluation"
TORCH, FBGEMM = "torch EmbeddingBag", "fbgemm_gpu"
RAGGED, SPARSE = "ours, ragged group", "ours, sparse group"
WARM_UP_OURS = 60  # Adam's replay must catch up rows with gaps
EMPTY_KEY, DELETED_KEY = -(2**63), -(2**63) + 1  # DenseHashTable reserves two keys


def _optimizer(rule):
    v1 = tf.compat.v1.train
    return {
        "SGD": lambda: v1.GradientDescentOptimizer(RATE),
        "Adagrad": lambda: v1.AdagradOptimizer(RATE),
        "Adam": lambda: tf.keras.optimizers.Adam(RATE, epsilon=1e-7),
        "v1 Adam": lambda: v1.AdamOptimizer(RATE),
    }[rule]()


def trainer(rule, variables, forward, *, wrap):
    """A function that takes one step on a batch, and one that only looks up.

    `forward(*inputs)` returns a list of embeddings; the gradient of each is 0.01.
    """
    optimizer = _optimizer(rule)
    if wrap:
        optimizer = sok.OptimizerWrapper(optimizer)
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    # Upstream gradients of 0.01, made once, so that no contender pays for them.
    upstream: list[tf.Tensor] = []

    @tf.function(reduce_retracing=True)
    def step(upstream, *inputs):
        with tf.GradientTape() as tape:
            embeddings = forward(*inputs)
        grads = tape.gradient(embeddings, variables, output_gradients=upstream)
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    @tf.function(reduce_retracing=True)
    def look(*inputs):
        return forward(*inputs)

    def run(*inputs):
        if not upstream:
            upstream.extend(tf.fill(tf.shape(e), 0.01) for e in look(*inputs))
        step(upstream, *inputs)

    return run, look


def cycle(call, batches):
    return lambda i: call(*batches[i % len(batches)])


def dense_variable(num_rows, dim):
    return tf.Variable(tf.random.uniform([num_rows, dim], -0.05, 0.05, seed=1))


def _index_table(keys):
    """A DenseHashTable from keys to positions `0, 1, ...`, at most half full from the start."""
    buckets = 1 << (2 * len(keys) - 1).bit_length()
    table = tf.lookup.experimental.DenseHashTable(
        tf.int64,
        tf.int64,
        default_value=-1,
        empty_key=EMPTY_KEY,
        deleted_key=DELETED_KEY,
        initial_num_buckets=buckets,
    )
    for start in range(0, len(keys), 1 << 20):
        part = np.arange(start, min(start + (1 << 20), len(keys)))
        table.insert(tf.constant(keys[part]), tf.constant(part))
    return table


# ---- W1 ----


def w1(rule: str, quick: bool) -> tuple[dict[str, Contender], list[Match]]:
    """One layer with 26 fields, and 26 tables in a group, against one dense array."""
    data = workloads.w1(quick)
    keys = [(tf.constant(k),) for k in data.keys]
    contenders = {
        OURS: w1_layer(rule, data, keys),
        GROUP: _w1_group(rule, data, keys),
        **w1_groups_of_ids(rule, data),
    }
    rows = data.num_rows
    peers = {
        "SGD": [("TF dense v1 SGD", "SGD", False, 1.0)],
        "Adagrad": [
            ("TF DenseHashTable + dense v1 Adagrad", "Adagrad", True, 0.4),
            ("TF dense v1 Adagrad", "Adagrad", False, None),
        ],
        "Adam": [
            ("Keras 3 Adam on dense", "Adam", False, 0.2),
            ("TF dense v1 Adam", "v1 Adam", False, None),
        ],
    }[rule]
    matches = []
    for name, peer_rule, hashed, target in peers:
        table = _index_table(workloads.mixed(np.arange(rows))) if hashed else None
        inputs = keys if hashed else [(tf.constant(p),) for p in data.positions]
        contenders[name] = _w1_dense(peer_rule, data, inputs, table)
        matches.append(Match(f"W1 step {rule}", OURS, name, target))
        of_groups = target if rule == "Adagrad" else None
        matches += [Match(f"W1 step {rule}", group, name, of_groups) for group in (SPARSE, RAGGED)]
        matches.append(Match(f"W1 step {rule}", GROUP, name))
    contenders.update(_fbgemm(rule, data))
    if FBGEMM in contenders:
        matches += [Match(f"W1 step {rule}", ours, FBGEMM) for ours in (OURS, SPARSE, RAGGED)]
    return contenders, matches


def w1_layer(rule, data, keys):
    features = data.keys.shape[-1]
    layer = sok.DistributedEmbedding("sum", None, data.dim, slot_num=features, max_nnz=1)
    insert(layer.table, workloads.mixed(np.arange(data.num_rows)))
    run, _ = trainer(
        rule, [layer.embedding_variable], lambda keys: [layer(keys, training=True)], wrap=True
    )
    return Contender(cycle(run, keys), warm_up=WARM_UP_OURS)


def _w1_tables(data):
    """One table per feature, with all its keys."""
    features = data.keys.shape[-1]
    tables = [sok.EmbeddingVariable(data.dim, name=f"w1_{f}") for f in range(features)]
    rows = data.num_rows // features
    for f, table in enumerate(tables):
        insert(table, workloads.mixed(np.arange(f * rows, (f + 1) * rows)))
    return tables


def w1_groups_of_ids(rule, data):
    """26 tables, each with a RaggedTensor or a SparseTensor. Without a rule: lookup only."""
    tables = _w1_tables(data)
    batch = data.keys.shape[1]
    splits = tf.range(batch + 1, dtype=tf.int64)
    indices = tf.stack([splits[:-1], tf.zeros_like(splits[:-1])], 1)
    shape = tf.constant([batch, 1], tf.int64)
    columns = [[tf.constant(k[:, f]) for f in range(len(tables))] for k in data.keys]
    ragged = [
        ([tf.RaggedTensor.from_row_splits(c, splits, validate=False) for c in batch],)
        for batch in columns
    ]
    sparse = [([tf.SparseTensor(indices, c, shape) for c in batch],) for batch in columns]
    run = _group_call(rule, tables)
    warm_up = WARM_UP_OURS if rule else 5
    return {
        RAGGED: Contender(cycle(run, ragged), warm_up=warm_up),
        SPARSE: Contender(cycle(run, sparse), warm_up=warm_up),
    }


def _group_call(rule, tables):
    """A step, or without a rule a lookup, for ids of either kind, which share the tables."""

    def forward(ids):
        return sok.group_embedding_lookup_sparse(tables, ids, "sum", training=True)

    if rule is None:
        return tf.function(forward, reduce_retracing=True)
    return trainer(rule, tables, forward, wrap=True)[0]


def _w1_group(rule, data, keys):
    tables = _w1_tables(data)

    def forward(keys):
        # Models have their features in separate tensors.
        columns = tf.unstack(tf.transpose(keys))
        group = [
            group_lookup.HashFeature(table, column)
            for table, column in zip(tables, columns, strict=True)
        ]
        return group_lookup.lookup(group, training=True)

    run, _ = trainer(rule, tables, forward, wrap=True)
    return Contender(cycle(run, keys), warm_up=WARM_UP_OURS)


def _w1_dense(rule, data, inputs, table):
    variable = dense_variable(data.num_rows, data.dim)

    def forward(keys):
        if table is None:
            return [tf.gather(variable, keys)]
        return [tf.gather(variable, table.lookup(tf.reshape(keys, [-1])))]

    run, _ = trainer(rule, [variable], forward, wrap=False)
    return Contender(cycle(run, inputs))


def w1_forward(quick: bool) -> tuple[dict[str, Contender], list[Match]]:
    """W1's lookup alone."""
    data = workloads.w1(quick)
    keys = [(tf.constant(k),) for k in data.keys]
    layer = sok.DistributedEmbedding("sum", None, data.dim, slot_num=26, max_nnz=1)
    everything = workloads.mixed(np.arange(data.num_rows))
    insert(layer.table, everything)
    look = tf.function(lambda keys: layer(keys, training=True))
    variable = dense_variable(data.num_rows, data.dim)
    gather = tf.function(lambda positions: tf.gather(variable, positions))
    table = _index_table(everything)
    find = tf.function(lambda keys: tf.gather(variable, table.lookup(tf.reshape(keys, [-1]))))
    evaluate = tf.function(lambda keys: layer(keys, training=False))
    contenders = {
        OURS: Contender(cycle(look, keys)),
        EVALUATION: Contender(cycle(evaluate, keys)),
        **w1_groups_of_ids(None, data),
        "tf.gather": Contender(cycle(gather, [(tf.constant(p),) for p in data.positions])),
        "TF DenseHashTable + tf.gather": Contender(cycle(find, keys)),
        **_torch_bag(data),
    }
    matches = [
        Match("W1 forward", ours, peer)
        for peer in contenders
        if not peer.startswith(OURS)
        for ours in (OURS, EVALUATION, SPARSE, RAGGED)
    ]
    return contenders, [
        dataclasses.replace(m, target=1.0) if (m.ours, m.peer) == (OURS, TORCH) else m
        for m in matches
    ]


def _torch_bag(data) -> dict[str, Contender]:
    """PyTorch's EmbeddingBag over positions, one bag per key, if PyTorch is installed."""
    try:
        import torch
    except ImportError:
        return {}
    bags = torch.nn.EmbeddingBag(data.num_rows, data.dim, mode="sum")
    offsets = torch.arange(data.positions[0].size)
    batches = [(torch.from_numpy(p.reshape(-1)), offsets) for p in data.positions]
    return {TORCH: Contender(cycle(torch.no_grad()(bags), batches))}


def _fbgemm(rule, data) -> dict[str, Contender]:
    """FBGEMM's table-batched bags over positions, which update in their backward, if installed."""
    try:
        import torch
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
    except (ImportError, OSError):  # OSError: built for another version of PyTorch
        return {}
    kinds = {"SGD": "EXACT_SGD", "Adagrad": "EXACT_ADAGRAD"}
    if rule not in kinds:
        return {}
    _, batch, features = data.positions.shape
    rows = data.num_rows // features
    place = (fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)
    bags = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, data.dim, *place)] * features,
        optimizer=getattr(fbgemm.OptimType, kinds[rule]),
        learning_rate=RATE,
    )
    in_table = (data.positions - rows * np.arange(features)).transpose(0, 2, 1)
    batches = [(torch.from_numpy(np.ascontiguousarray(p).reshape(-1)),) for p in in_table]
    offsets = torch.arange(batch * features + 1)
    upstream = torch.full([batch, features * data.dim], 0.01)
    return {FBGEMM: Contender(cycle(lambda ids: bags(ids, offsets).backward(upstream), batches))}


# ---- W2 ----


def w2(rule: str, quick: bool) -> tuple[dict[str, Contender], list[Match]]:
    """A group of 4 tables against 4 dense arrays."""
    data = workloads.w2(quick)
    if rule == "Adam":
        name, target = "Keras 3 Adam on dense", 0.06
    else:
        name, target = "TF DenseHashTable + dense v1 Adagrad", 0.45
    everything = workloads.mixed(np.arange(data.num_rows))
    hashed = rule != "Adam"
    contenders = _w2_groups_of_ids(rule, data, everything)
    contenders[name] = _w2_dense(rule, data, everything if hashed else None)
    return contenders, [
        Match(f"W2 step {rule}", RAGGED, name, target),
        Match(f"W2 step {rule}", SPARSE, name, target),
    ]


def w2_forward(quick: bool) -> tuple[dict[str, Contender], list[Match]]:
    """W2's lookup alone."""
    data = workloads.w2(quick)
    everything = workloads.mixed(np.arange(data.num_rows))
    peer = "TF DenseHashTable + embedding_lookup_sparse"
    contenders = _w2_groups_of_ids(None, data, everything)
    contenders[peer] = _w2_dense(None, data, everything)
    return contenders, [Match("W2 forward", ours, peer) for ours in (SPARSE, RAGGED)]


def _ragged_inputs(data, field):
    batches = range(len(data.tables[0].row_splits))
    return [
        (
            [tf.constant(getattr(table, field)[b]) for table in data.tables],
            [tf.constant(table.row_splits[b]) for table in data.tables],
        )
        for b in batches
    ]


def _w2_groups_of_ids(rule, data, everything):
    tables = [sok.EmbeddingVariable(data.dim, name=f"w2_{t}") for t in range(len(data.tables))]
    for table in tables:
        insert(table, everything)
    ragged = [
        [
            tf.RaggedTensor.from_row_splits(k, splits, validate=False)
            for k, splits in zip(*batch, strict=True)
        ]
        for batch in _ragged_inputs(data, "keys")
    ]
    sparse = [([ids.to_sparse() for ids in batch],) for batch in ragged]
    run = _group_call(rule, tables)
    warm_up = WARM_UP_OURS if rule else 5
    return {
        RAGGED: Contender(cycle(run, [(batch,) for batch in ragged]), warm_up=warm_up),
        SPARSE: Contender(cycle(run, sparse), warm_up=warm_up),
    }


def _w2_dense(rule, data, hashed_keys):
    variables = [dense_variable(data.num_rows, data.dim) for _ in data.tables]
    indexes = None if hashed_keys is None else [_index_table(hashed_keys) for _ in data.tables]

    def forward(keys, row_splits):
        embeddings = []
        for t, variable in enumerate(variables):
            positions = keys[t] if indexes is None else indexes[t].lookup(keys[t])
            ragged = tf.RaggedTensor.from_row_splits(positions, row_splits[t], validate=False)
            embeddings.append(tf.nn.embedding_lookup_sparse(variable, ragged, None, combiner="sum"))
        return embeddings

    if rule is None:
        run = tf.function(forward, reduce_retracing=True)
    else:
        run, _ = trainer(rule, variables, forward, wrap=False)
    inputs = _ragged_inputs(data, "positions" if hashed_keys is None else "keys")
    return Contender(cycle(run, inputs), warm_up=3)


def insert(table, keys):
    for start in range(0, len(keys), 1 << 18):
        group_lookup.lookup(
            [group_lookup.HashFeature(table, tf.constant(keys[start : start + (1 << 18)]))],
            training=True,
        )
