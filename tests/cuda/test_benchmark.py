"""The benchmark of the device tables runs, with its small sizes; its figures are not checked."""

from benchmarks import gpu_table
from tests.cuda import stub_libraries


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
    names = [figure["name"] for figure in figures if not figure["name"].startswith("torch")]
    assert [name.split()[0] for name in names] == [name.split()[0] for name in wanted]


def test_loads_are_those_asked_for(cuda):
    figures = gpu_table.run(cuda, gpu_table.QUICK)
    loads = {float(f["name"].split()[-1]) for f in figures if f["name"].startswith("find ")}
    # 3 batches of 128 keys stay free of 4096 slots.
    assert loads == {0.5, 0.88}


def test_the_lookups_of_pytorch(cuda, capsys):
    """Against a stub: that the lines run, which else need a device."""
    torch = stub_libraries.torch_with_embeddings()
    bench = gpu_table.TableBench(cuda, gpu_table.QUICK)
    bench._torch_lookups(torch, 4)
    assert set(torch.calls) == {"embedding", "embedding_bag sum"}
    names = [figure["name"].split(" dim")[0].strip() for figure in bench.figures]
    assert names == ["torch embedding", "torch embedding_bag"]
