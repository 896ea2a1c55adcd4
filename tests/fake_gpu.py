"""TensorFlow's own GPU runtime over a driver that fakes a GPU: `tools/fake_gpu.sh`.

Tables are in the memory of TensorFlow's device "GPU", which the host cannot touch, and their
kernels are emulated. All else is put on the CPU, since TensorFlow's own kernels are not there: a
test during which one is launched fails, whatever it says.

`SOK_TEST_OPS=gpu` does the same on a real device, where kernels are not emulated: what a test
compares with is then still computed on the CPU.
"""

import ctypes
import os
import threading

import pytest

from tests import emulated

# Tests that cannot pass, by reason: names, or their beginnings.
ABSENT = {
    "rows of 16 bits are of tables in host memory": [
        "tests/table/test_row_dtype.py",
        "tests/lookup/test_evaluation.py::test_samples_of_any_length[bfloat16",
        "tests/lookup/test_stock_table.py::test_a_missing_key_of_a_table_of_16_bits",
        "tests/group_embedding/test_layer.py::test_configuration_makes_the_same_layer",
        "tests/lookup/test_learned_weights.py::test_rows_are_those_of_the_lookup[bfloat16",
        "tests/serving/test_parts.py",
    ],
    "occurrences are counted by tables in host memory": [
        "tests/table/test_occurrences.py",
        "tests/table/test_policies_ranks.py::test_occurrences",
    ],
    "rows on disk are of tables in host memory": ["tests/table/test_storage.py"],
    "deltas are of tables in host memory": [
        "tests/saving/test_saver.py::test_a_full_disk_names_file_and_table",
        "tests/saving/test_memory.py::test_files_take_parts_of_a_table_beside_it",
        "tests/saving/test_restore.py::test_the_row_of_a_key_that_comes_later_has_decayed[SGD-delta]",
        "tests/saving/test_restore.py::test_the_row_of_a_key_that_comes_later_has_decayed[AdamW-delta]",
        "tests/saving/parts/test_resized.py::test_a_chain_of_deltas",
        "tests/saving/format/test_in_use.py::test_dumps_into_the_folder_of_a_living_job",
        "tests/saving/format/test_progress.py::test_calls_that_show_it",
        "tests/serving/test_signatures.py::test_a_signature_computes_what_the_model_does[True",
        "tests/saving/parts/test_table_names.py::test_a_dump_is_restored_under_another_name",
        "tests/inspection/test_find_key.py::test_deltas_until_they_are_merged",
        "tests/inspection/test_find_key.py::test_exports_with_their_deltas_and_servers",
        "tests/inspection/test_find_key.py::test_numbers_that_stand_in_free_slots[True]",
        "tests/table/test_policies.py::test_what_a_smaller_table_keeps[delta]",
        "tests/serving/test_dense.py",
        "tests/callbacks/test_resume.py::test_no_batch_is_trained_twice[stream in the background]",
    ],
    "a call on device tables that raises has changed none of them": [
        "tests/group_embedding/test_many_tables.py::test_full_table_in_the_middle",
    ],
    "TensorFlow finds keys, and reads no dense table, where ids lie elsewhere": [
        "tests/lookup/test_by_key.py::test_dense_reads_raise_and_name_the_way[ragged ids without",
    ],
}
ABSENT_ON_THE_FAKE = {
    "the process's memory has the device's in it": [
        "tests/saving/test_memory.py::test_restores_that_were_cancelled",
    ],
    "TensorFlow's lookups have their own ops beside the table, as casts of int32 keys": [
        "tests/lookup/test_by_key.py::test_lookups_insert_the_keys_they_look_up",
        "tests/lookup/test_by_key.py::test_lookups_of_tensorflow",
        "tests/lookup/test_by_key.py::test_weights_have_the_gradient",
        "tests/group_embedding/test_variables.py::test_a_partitioned_table",
        "tests/sok2/test_training.py::test_sgd",
        "tests/sok2/test_variables.py::test_dynamic_variable_under_its_names",
    ],
    "TensorFlow sums the gradient of a sequence's rows beside them": [
        "tests/group_embedding/test_lookup_sparse.py::test_sequences",
        "tests/group_embedding/test_packed.py::test_is_the_list[sequence",
        "tests/group_embedding/test_ranks.py::test_gradient_scales",
    ],
    "TensorFlow gathers what a server looks up beside them": [
        "tests/serving/test_signatures.py::test_a_signature_computes_what_the_model_does[False]",
    ],
    "TensorFlow takes norms of gradients beside them": [
        "tests/lookup/test_norms.py",
    ],
}
ABSENT_UNDER_TF_KERAS = {
    "its optimizers compile by XLA where a GPU is, in the oracle, too": [
        "tests/optimizers/test_scope.py::test_in_a_v1_graph_with_ordinary_variables[keras",
        "tests/optimizers/test_scope.py::test_a_stock_optimizer_moves_rows",
    ],
}


def asked_for() -> bool:
    """Whether this process is to have its tables, and nothing else, on a GPU."""
    return os.environ.get("SOK_TEST_OPS") in ("fake_gpu", "gpu")


def is_real() -> bool:
    """Whether that GPU is no fake."""
    return os.environ.get("SOK_TEST_OPS") == "gpu"


def launched() -> list[str]:
    """TensorFlow's kernels that were launched since the last call, and did nothing."""
    if is_real():
        return []
    function = ctypes.CDLL("libcuda.so.1").sok_fake_gpu_launched
    function.restype = ctypes.c_char_p
    return sorted({name for name in function().decode().split("\n") if name})


class Plugin:
    """What pytest is to do differently."""

    def __init__(self):
        import tensorflow as tf

        from sok_like.runtime.native import devices

        assert tf.config.list_physical_devices("GPU"), (
            "TF_CPP_MIN_LOG_LEVEL=0 says why there is none"
        )
        if not is_real():
            emulated.install()
            devices._runtime_problem = lambda: ""
        devices.table_scope = lambda: tf.device("/GPU:0")
        # A scope does not reach into other threads, nor into graphs of sessions, where TensorFlow
        # places our ops by itself.
        run, make_graph = threading.Thread.run, tf.Graph.__init__

        def run_on_cpu(thread):
            with tf.device("/CPU:0"):
                run(thread)

        def make_on_cpu(graph):
            make_graph(graph)
            if type(graph) is tf.Graph:
                graph._add_device_to_stack(lambda op: "" if "Sok" in op.type else "/CPU:0")

        threading.Thread.run, tf.Graph.__init__ = run_on_cpu, make_on_cpu

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        import tensorflow as tf

        with tf.device("/CPU:0"):
            return (yield)

    pytest_collection = pytest_runtest_protocol  # modules have constants, too

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self):
        launched()
        try:
            return (yield)
        finally:
            if kernels := launched():
                pytest.fail(f"needs TensorFlow's kernels on the GPU: {kernels}", pytrace=False)

    def pytest_collection_modifyitems(self, items):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # programs that tests start run on the CPU
        absent = ABSENT | ({} if is_real() else ABSENT_ON_THE_FAKE)
        if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
            absent |= ABSENT_UNDER_TF_KERAS
        for item in items:
            for reason, names in absent.items():
                if item.nodeid.startswith(tuple(names)):
                    item.add_marker(pytest.mark.skip(reason=reason))
