"""The benchmark of the device tables runs, with its small sizes; its figures are not checked."""

import types

import numpy as np

from benchmarks import gpu_table


def test_every_figure_is_printed(cuda, capsys):
    figures = gpu_table.run(cuda, gpu_table.QUICK)
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "skipped" in line]
    wanted = ["step adagrad dim 16 by key", "step adagrad dim 16 by row"]
    wanted += [f"step adagrad dim 16, 3 tables of {examples}" for examples in (16, 2)]
    wanted += [f"sums by key dim 16, one key {percent} %" for percent in (0, 50, 90)]
    wanted += ["insert", "find", "find_or_insert", "assign"] * 2
    wanted += ["update adagrad", "update lazy_adam", "update adam"]
    cases = ["no policy", "filter present", "filter waiting", "lru full"]
    wanted += [f"lookup {case}" for case in cases]
    lines = [line for line in lines[2:] if not line.startswith("torch")]
    assert len(lines) == len(wanted)
    for line, start in zip(lines, wanted, strict=True):
        assert line.startswith(start) and "nan" not in line
    figures = [figure for figure in figures if not figure["name"].startswith("torch")]
    assert [f["name"].split()[0] for f in figures] == [name.split()[0] for name in wanted]
    loads = {float(f["name"].split()[-1]) for f in figures if f["name"].startswith("find ")}
    # Those asked for; 3 batches of 128 keys stay free of 4096 slots.
    assert loads == {0.5, 0.88}


def test_the_lookups_of_pytorch(cuda):
    """Against as much of PyTorch as they call: that the lines run, which else need a device."""
    calls = []
    event = types.SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.0)

    def embedding(indices, table):
        calls.append("embedding")
        return table[indices]

    def embedding_bag(indices, table, offsets, mode):
        calls.append(f"embedding_bag {mode}")
        return np.add.reduceat(table[indices], offsets)

    functional = types.SimpleNamespace(embedding=embedding, embedding_bag=embedding_bag)
    torch = types.SimpleNamespace(
        rand=lambda shape, device: np.zeros(shape),
        randint=lambda low, high, shape, device: np.full(shape, high - 1),
        arange=lambda count, device: np.arange(count),
        nn=types.SimpleNamespace(functional=functional),
        cuda=types.SimpleNamespace(Event=lambda enable_timing: event, synchronize=lambda: None),
    )
    bench = gpu_table.TableBench(cuda, gpu_table.QUICK)
    bench._torch_lookups(torch, 4)
    assert set(calls) == {"embedding", "embedding_bag sum"}
    names = [figure["name"].split(" dim")[0].strip() for figure in bench.figures]
    assert names == ["torch embedding", "torch embedding_bag"]
