"""What the group lookups refuse, and their error messages."""

import re

import pytest
import tensorflow as tf

v1 = tf.compat.v1
IDS = tf.ragged.constant([[1], [2, 3]], dtype=tf.int64)
WEIGHTS = tf.ragged.constant([[1.0], [2.0, 3.0]])
SPARSE = WEIGHTS.to_sparse()
OF_OTHERS, NESTED = tf.ragged.constant([[1.0, 2.0], [3.0]]), tf.ragged.constant([[[1]]])
INVALID = tf.errors.InvalidArgumentError


@pytest.fixture
def call(sok):
    """The group lookup of a table and a variable, with the arguments that a case replaces."""
    table, dense = sok.EmbeddingVariable(2, name="users"), tf.Variable(tf.ones([5, 2]), name="ads")

    def lookup(**replaced):
        arguments = {"params": [table, dense], "sp_ids": [IDS, IDS], "combiners": ["sum", "mean"]}
        return sok.group_embedding_lookup_sparse(**{**arguments, **replaced})

    return lookup


@pytest.mark.parametrize(
    "replaced, error, words",
    [
        ({"params": None}, ValueError, "`params` must be given"),
        ({"params": [], "sp_ids": []}, ValueError, "at least one table"),
        ({"params": ["users", "ads"]}, TypeError, "EmbeddingVariables or tf.Variables.*'users'"),
        ({"params": [tf.Variable([1.0])] * 2}, TypeError, "[input_dim, output_dim]"),
        ({"sp_ids": [IDS]}, ValueError, "`sp_ids` must have an item for each of the 2.*1 items"),
        ({"sp_ids": IDS}, ValueError, "`sp_ids` must be a list or a tuple"),
        ({"sp_ids": None}, ValueError, "`sp_ids` must be a list or a tuple.*None"),
        ({"sp_ids": [IDS, tf.constant([[1]])]}, TypeError, "SparseTensors or RaggedTensors.*'ads"),
        ({"sp_ids": [WEIGHTS, IDS]}, TypeError, "`sp_ids` must be integers.*float32.*'users'"),
        ({"sp_ids": [IDS, NESTED]}, ValueError, "must be 2-D, [batch, None].*'ads"),
        ({"sp_ids": [IDS, tf.sparse.from_dense([[[1]]])]}, ValueError, "must be 2-D"),
        ({"combiners": ["sum"]}, ValueError, "`combiners` must have an item for each of the 2"),
        ({"combiners": ["sum", "max"]}, ValueError, "one of ('sum', 'mean', 'sqrtn').*'max'"),
        ({"combiners": ["sum", "none"]}, ValueError, "one of ('sum', 'mean', 'sqrtn').*'none'"),
        ({"combiners": "min"}, ValueError, "one of ('sum', 'mean', 'sqrtn').*'min'"),
        ({"combiners": 3}, ValueError, "`combiners` must be a list or a tuple.*3"),
        ({"partition_strategy": "div"}, ValueError, "must be 'mod'.*'div'"),
        ({"partition_strategy": [WEIGHTS] * 2}, ValueError, "Pass weights by keyword"),
        ({"sp_weights": [WEIGHTS]}, ValueError, "`sp_weights` must have an item for each of the 2"),
        ({"sp_weights": WEIGHTS}, ValueError, "`sp_weights` must be a list or a tuple"),
        ({"sp_weights": [IDS, None]}, TypeError, "`sp_weights` must be floats.*int64.*'users'"),
        ({"sp_weights": [None, SPARSE]}, ValueError, "kind and shape as `sp_ids`.*'ads"),
        ({"sp_weights": [WEIGHTS[:1], None]}, ValueError, "the same kind and shape.*'users'"),
        ({"sp_weights": [OF_OTHERS, None]}, INVALID, "exactly one weight per id (table 'users')"),
        ({"sp_weights": [tf.ragged.constant([[1.0], [3.0]]), None]}, INVALID, "one weight per id"),
        ({"sp_weights": [WEIGHTS, None], "is_sequence": True}, ValueError, "nothing is combined"),
        ({"params_num_per_group": 0}, ValueError, "positive integer.*0"),
        ({"training": tf.constant(True)}, TypeError, "`training` must be a Python bool"),
        ({"gradient_scale": "none"}, ValueError, "`gradient_scale` must be one of"),
        ({"sp_ids": [IDS, IDS + 2]}, INVALID, "'ads:0' must be in [0, input_dim).*id 5"),
    ],
)
def test_refused(call, replaced, error, words):
    pattern = ".*".join(re.escape(part) for part in words.split(".*"))
    with pytest.raises(error, match=f"(?s){pattern}"):
        call(**replaced)


def test_no_combiners_are_means_with_a_warning(call):
    with pytest.warns(UserWarning, match="`combiners` is None: 'mean' is used") as caught:
        found = call(combiners=None)
    assert caught[0].filename == __file__
    for ours, right in zip(found, call(combiners=["mean", "mean"]), strict=True):
        assert (ours == right).numpy().all()


def test_one_combiner_counts_for_all_and_params_num_per_group_changes_nothing(call):
    given = call(combiners="sqrtn", params_num_per_group=1)
    for ours, right in zip(given, call(combiners=("sqrtn",) * 2), strict=True):
        assert (ours == right).numpy().all()


def test_a_partitioned_variable_of_several_parts(sok):
    with tf.Graph().as_default():
        with v1.variable_scope("s", partitioner=v1.fixed_size_partitioner(2)):
            parts = v1.get_variable("parts", [4, 2])
        with pytest.raises(TypeError, match="PartitionedVariable.*'s/parts' in 2 parts"):
            sok.group_embedding_lookup_sparse([parts], [IDS], ["sum"])


def test_dense_lookup_refuses(sok):
    table = sok.EmbeddingVariable(2, name="users")
    with pytest.raises(ValueError, match="`params` must be given"):
        sok.group_embedding_lookup(None, [[1]])
    with pytest.raises(ValueError, match="`ids` must have an item for each of the 1.*2 items"):
        sok.group_embedding_lookup([table], [[1], [2]])
    with pytest.raises(ValueError, match="must be 'mod'.*'div'"):
        sok.group_embedding_lookup([table], [[1]], "div")
    with pytest.raises(TypeError, match="`ids` must be dense.*'users'"):
        sok.group_embedding_lookup([table], [IDS])
    with pytest.raises(TypeError, match="`ids` must be integers.*float32.*'users'"):
        sok.group_embedding_lookup([table], [[1.0]])


def test_group_of_variables_needs_no_init(sok):
    from sok_like.runtime.ranks import initialize

    initialize.reset()
    found = sok.group_embedding_lookup_sparse(tf.Variable(tf.ones([4, 2])), [IDS], "sum")
    assert found[0].numpy().tolist() == [[1, 1], [2, 2]]
    with pytest.raises(ValueError, match="`gradient_scale` must be one of"):
        sok.group_embedding_lookup(tf.Variable([[1.0]]), [[0]], gradient_scale="none")
