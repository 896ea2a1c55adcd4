"""The model of a step, by hand; the steps that are measured; constants from them; the program."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.predict import __main__ as program
from benchmarks.predict import steps
from benchmarks.predict.model import Machine, Workload, counts, predict

# ---- the model ----

# One unit of each constant is one second, so that a prediction shows what was counted.
ONES = Machine(4, **dict.fromkeys([f.name for f in dataclasses.fields(Machine)][1:], 1.0))
WORKLOAD = Workload(tables=2, batch=4096, dim=8, hotness=2, distinct=0.5)


def test_one_rank_exchanges_nothing():
    # 16,384 keys of which 8,192 differ, on 4 threads. A row of 8 floats is copied to the batch, has
    # a gradient, and is updated with 8 more of Adagrad: 4 * 8 floats.
    found = predict(WORKLOAD, ONES, 1)
    assert found == (1 + 2, (16_384 + 8_192 + 8_192 * 32) / 4, 0, 0, 0, 0)
    assert found.total == sum(found)
    assert found.largest == "tables"


def test_two_hosts():
    # 8 ranks, 4 per host with 4 cores: one thread per rank. A rank's messages hold 8,192 keys of 8
    # bytes, and twice as many rows of 32 bytes; 4 of 8 ranks are on the other host.
    sent = 8_192 * (8 + 2 * 32)
    found = predict(WORKLOAD, ONES, 8, ranks_per_host=4)
    tables = 16_384 + 8_192 + 8_192 * 32
    assert found == (3, tables, 3, 8_192 + sent, 3 * 4, 4 * sent * 4 / 8)


def test_more_ranks_than_cores_take_turns():
    two, four = (predict(WORKLOAD, dataclasses.replace(ONES, cores=2), n) for n in (2, 4))
    assert four == tuple(2 * seconds for seconds in two)


@pytest.mark.parametrize("batch, threads", [(100, 1), (1536, 3), (100_000, 4)])
def test_a_thread_gets_1024_keys_at_least(batch, threads):
    workload = Workload(tables=2, batch=batch, dim=8)
    assert counts(workload, 4, 1)["key"] == pytest.approx(2 * batch / threads)


def test_many_ranks_wait_for_messages():
    machine = Machine(4, **{**dict.fromkeys(ONES.constants(), 1e-9), "message": 20e-6})
    few, many = (predict(WORKLOAD, machine, n, 8) for n in (16, 1024))
    assert few.largest != "messages" and many.largest == "messages"
    assert many.messages == pytest.approx(3 * (1024 - 8) * 20e-6)


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: Workload(0, 1, 1), "`tables` must be a positive integer. Received: tables=0"),
        (lambda: Workload(1, 2.5, 1), "`batch` must be a positive integer. Received: batch=2.5"),
        (lambda: Workload(1, 1, 1, slots=-1), "`slots` must be an integer >= 0"),
        (lambda: Workload(1, 1, 1, distinct=0), r"`distinct` must be in \(0, 1\]"),
        (lambda: Workload(1, 1, 1, distinct=float("nan")), "Received: distinct=nan"),
        (lambda: dataclasses.replace(ONES, cores=0), "`cores` must be a positive integer"),
        (lambda: dataclasses.replace(ONES, key=-1e-9), "`key` must be a finite number"),
        (lambda: dataclasses.replace(ONES, key="fast"), "Received: key='fast'"),
        (lambda: dataclasses.replace(ONES, network=float("inf")), "Received: network=inf"),
        (lambda: predict(WORKLOAD, ONES, 0), "`ranks` must be a positive integer"),
        (lambda: predict(WORKLOAD, ONES, 2, 0), "`ranks_per_host` must be a positive integer"),
    ],
)
def test_arguments_out_of_range(call, error):
    with pytest.raises(ValueError, match=error):
        call()


# ---- steps ----


@pytest.fixture
def small(monkeypatch, sok):
    monkeypatch.setattr(steps, "_NUM_ROWS", 600)
    monkeypatch.setattr(steps, "_SECONDS", 0.0)


def test_batches_have_the_asked_number_of_different_keys():
    workload = Workload(tables=3, batch=20, dim=4, hotness=2, distinct=0.25)
    batches = [keys.numpy() for keys in steps.batches(workload, 200, rank=0)]
    assert all(keys.shape == (3, 40) for keys in batches)
    assert {len(np.unique(keys[t])) for keys in batches for t in range(3)} == {10}
    other = next(steps.batches(workload, 200, rank=1)).numpy()
    assert (other != batches[0]).any()


def test_a_step_updates_the_keys_of_all_tables(small):
    workload = Workload(tables=3, batch=20, dim=4, hotness=2, distinct=0.25, slots=0)
    tables = steps.Tables(workload)
    assert [table.stats().size for table in tables.tables] == [200] * 3  # no key is new below
    keys = next(steps.batches(workload, tables.num_rows, rank=0))
    before = [table.sparse_read(k) for table, k in zip(tables.tables, keys, strict=True)]
    tables.step(keys, tf.range(0, 41, 2, tf.int64))
    after = [table.sparse_read(k) for table, k in zip(tables.tables, keys, strict=True)]
    for old, new, of_table in zip(before, after, keys.numpy(), strict=True):
        counts = (of_table[:, np.newaxis] == of_table).sum(1)
        expected = old - 0.01 * counts[:, np.newaxis]  # SGD; each key's gradient is 1
        np.testing.assert_allclose(new, expected, rtol=1e-5)
    assert [table.stats().size for table in tables.tables] == [200] * 3


@pytest.mark.parametrize("slots, floats", [(0, 4), (1, 8), (2, 12)])
def test_optimizers_have_the_asked_slot_rows(small, slots, floats):
    workload = Workload(tables=1, batch=20, dim=4, slots=slots)
    (table,) = steps.Tables(workload).tables
    assert table.stats().arena_bytes >= 600 * floats * 4


def test_a_rank_prints_one_time_per_workload(small, capsys):
    workloads = [{"tables": t, "batch": 8, "dim": 4} for t in (1, 2, 2)]
    steps.main(json.dumps(workloads))
    told = json.loads(capsys.readouterr().out)
    assert len(told["seconds"]) == 3 and min(told["seconds"]) > 0
    assert told["cores"] >= 1
    with pytest.raises(ValueError, match="`slots` must be 0, 1 or 2"):
        steps.main('[{"tables": 1, "batch": 8, "dim": 4, "slots": 3}]')


# ---- constants and the program ----

MACHINE = Machine(
    cores=2,
    step=4e-4,
    table=2e-5,
    key=4e-8,
    row=5e-8,
    moved=3e-10,
    exchange=2e-4,
    routed=6e-8,
    byte=2e-10,
)


def steps_of(machine, ranks=(1, 2)):
    return [
        program.Measured(workload, n, predict(workload, machine, n).total)
        for workload in program.CALIBRATION
        for n in ranks
    ]


def test_constants_are_found_again():
    found = program.calibrate(steps_of(MACHINE), cores=2)
    for workload in (Workload(1, 8192, 64), Workload(26, 1024, 16), Workload(100, 512, 32, 4, 0.5)):
        for ranks in (1, 2, 4, 64):
            expected = predict(workload, MACHINE, ranks, 2)
            assert predict(workload, found, ranks, 2).total == pytest.approx(
                expected.total, rel=0.01
            )


def test_constants_are_not_negative():
    # Two ranks are faster than one here: no constant could say so.
    fast = [step._replace(seconds=step.seconds / step.ranks**2) for step in steps_of(MACHINE)]
    found = program.calibrate(fast, cores=2)
    assert min(found.constants().values()) >= 0


def test_steps_that_say_nothing_are_refused():
    for ranks in ([1], [2]):
        with pytest.raises(ValueError, match="`steps` must be steps of one rank and of several"):
            program.calibrate(steps_of(MACHINE, ranks), cores=2)
    wrong = [step._replace(seconds=0.0) for step in steps_of(MACHINE)]
    with pytest.raises(ValueError, match="`seconds` must be positive. Received: seconds=0.0"):
        program.calibrate(wrong, cores=2)


NO_MACHINES = ["[]", '{"cores": 2}', "not JSON"]  # contents of files


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(vars(MACHINE)))
    return str(path)


def test_the_program_prints_what_predict_returns(file, capsys):
    arguments = ["--machine", file, "--ranks", "1", "1024", "--ranks-per-host", "8"]
    program.main([*arguments, "--cores", "8", "--latency-us", "10", "--gbit", "100"])
    heading, one, many, *helps = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["ranks", "hosts", "ms/step"]
    machine = dataclasses.replace(MACHINE, cores=8, message=1e-5, network=8e-11)
    for line, ranks, hosts in ((one, 1, "1"), (many, 1024, "128")):
        expected = predict(Workload(26, 8192, 16), machine, ranks, 8)
        numbers = [f"{1e3 * seconds:.2f}" for seconds in (expected.total, *expected)]
        assert line.split() == [f"{ranks:,}", hosts, *numbers, expected.largest]
    assert [text.partition(":")[0] for text in helps] == ["tables", "messages"]


def test_measured_constants_are_written_and_used(tmp_path, monkeypatch, capsys):
    def measure(ranks, workloads):
        return [step for step in steps_of(MACHINE, [ranks])], 2

    monkeypatch.setattr(program, "measure", measure)
    path = tmp_path / "new.json"
    program.main(["--measure", "--machine", str(path), "--ranks", "2"])
    measured = capsys.readouterr().out
    assert program.load_machine(str(path)).step == pytest.approx(MACHINE.step, rel=0.05)
    program.main(["--machine", str(path), "--ranks", "2"])
    assert capsys.readouterr().out == measured


@pytest.mark.slow
@pytest.mark.ranks
def test_measures_steps_on_two_ranks():
    (step,), cores = program.measure(2, [Workload(tables=2, batch=8, dim=4)])
    assert step.workload.tables == 2 and step.ranks == 2 and step.seconds > 0
    assert cores >= 1


def test_ranks_that_fail_are_said(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such slots >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(program.sys, "executable", str(python))
    with pytest.raises(RuntimeError, match=r"(?s)1 rank\(s\) could not be measured: .*slots"):
        program.measure(1, [Workload(1, 8, 4)])


@pytest.mark.parametrize(
    "arguments, error",
    [
        ([], "--machine FILE or --measure is required"),
        (["--machine", "no_such_file"], "No such file"),
        (["--measure", "--machine", "no_such_folder/file"], "must be in a folder that exists"),
        (["--machine", "FILE", "--batch", "0"], "`batch` must be a positive integer"),
        (["--machine", "FILE", "--ranks", "2", "-1"], "`ranks` must be a positive integer"),
        (["--machine", "FILE", "--ranks-per-host", "0"], "`ranks_per_host` must be"),
        (["--machine", "FILE", "--gbit", "0"], "`--gbit` must be positive"),
        (["--machine", "FILE", "--latency-us", "-1"], "`message` must be a finite number"),
        *((["--machine", text], "benchmarks.predict: ") for text in NO_MACHINES),
    ],
)
def test_errors(arguments, error, file, tmp_path):
    for number, text in enumerate(NO_MACHINES):
        (tmp_path / str(number)).write_text(text)
    paths = {"FILE": file, **{text: str(tmp_path / str(i)) for i, text in enumerate(NO_MACHINES)}}
    with pytest.raises(SystemExit, match=error):
        program.main([paths.get(argument, argument) for argument in arguments])
