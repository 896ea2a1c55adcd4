"""The benchmark of the device tables runs; its figures are not looked at."""

from benchmarks import gpu_table


def test_every_figure_is_printed(cuda, capsys):
    sizes = gpu_table.Sizes(
        log2_slots=12,
        batch=256,
        dims=(4,),
        loads=(0.5, 0.95),
        update_keys=512,
        step_batch=16,
        step_features=3,
        step_vocabulary=50,
        calls=2,
        repeats=1,
        copy_floats=1000,
    )
    gpu_table.run(cuda, sizes)
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "skipped" in line]
    wanted = ["copy", *["insert", "find", "find_or_insert"] * 2]
    wanted += ["update adagrad", "update lazy_adam", "update adam", "step adagrad"]
    lines = [line for line in lines if not line.startswith("torch")]
    assert len(lines) == len(wanted)
    for line, start in zip(lines, wanted, strict=True):
        assert line.startswith(start) and "nan" not in line
