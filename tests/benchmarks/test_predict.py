"""Constants from measured steps, and the program that predicts."""

import dataclasses
import json

import pytest

from benchmarks.predict import __main__ as program
from benchmarks.predict.model import Machine, Workload, predict

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


def steps(machine, ranks=(1, 2)):
    return [
        program.Measured(workload, n, predict(workload, machine, n).total)
        for workload in program.CALIBRATION
        for n in ranks
    ]


def test_constants_are_found_again():
    found = program.calibrate(steps(MACHINE), cores=2)
    for workload in (Workload(1, 8192, 64), Workload(26, 1024, 16), Workload(100, 512, 32, 4, 0.5)):
        for ranks in (1, 2, 4, 64):
            expected = predict(workload, MACHINE, ranks, 2)
            assert predict(workload, found, ranks, 2).total == pytest.approx(
                expected.total, rel=0.01
            )


def test_constants_are_not_negative():
    # Two ranks are faster than one here: no constant could say so.
    fast = [step._replace(seconds=step.seconds / step.ranks**2) for step in steps(MACHINE)]
    found = program.calibrate(fast, cores=2)
    assert min(found.constants().values()) >= 0


def test_steps_that_say_nothing_are_refused():
    for ranks in ([1], [2]):
        with pytest.raises(ValueError, match="`steps` must be steps of one rank and of several"):
            program.calibrate(steps(MACHINE, ranks), cores=2)
    wrong = [step._replace(seconds=0.0) for step in steps(MACHINE)]
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
        return [step for step in steps(MACHINE, [ranks])], 2

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
