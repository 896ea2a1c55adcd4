"""What long calls show on stderr: a bar on a terminal, lines elsewhere, on rank 0."""

import io

import tensorflow as tf

from sok_like.saving.format import progress
from tests import thread_ranks


def shown(monkeypatch, is_terminal, total, seconds):
    """What 10 MB per step show, where each step takes so many seconds."""
    stream, now = io.StringIO(), [100.0]
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.sys, "stderr", stream)
    of_call = progress.Progress("dump of table 'users'", total)
    for _ in range(10):
        now[0] += seconds
        of_call.add(10_000_000)
    of_call.close()
    return stream.getvalue()


def test_lines_of_a_log(sok, monkeypatch):
    begin = "sok_like: dump of table 'users', rank 0:"
    assert shown(monkeypatch, False, 100_000_000, 2).splitlines() == [
        f"{begin} 30 of 100 MB, 5 MB/s",
        f"{begin} 60 of 100 MB, 5 MB/s",
        f"{begin} 90 of 100 MB, 5 MB/s",
        f"{begin} 100 MB in 20 s, 5 MB/s",
    ]
    assert shown(monkeypatch, False, None, 3).startswith(f"{begin} 20 MB, 3 MB/s\n")
    assert shown(monkeypatch, False, 100_000_000, 0.4) == ""  # 4 seconds


def test_bar_on_a_terminal(sok, monkeypatch):
    updates = shown(monkeypatch, True, 100_000_000, 1).split("\r\033[K")[1:]
    begin = "sok_like: dump of table 'users', rank 0:"
    assert updates[0] == f"{begin} [############............] 50 of 100 MB, 10 MB/s"
    assert updates[-2] == f"{begin} [{'#' * 24}] 100 of 100 MB, 10 MB/s"
    assert updates[-1] == f"{begin} 100 MB in 10 s, 10 MB/s\n"
    assert len(updates) == 7


def test_other_ranks_show_nothing(sok, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", stream)
    monkeypatch.setattr(progress, "_SECONDS", 0.0)

    def call():
        progress.Progress("a call").add(1)

    thread_ranks.run(2, call)
    assert stream.getvalue().count("\n") == 1


def test_calls_that_show_it(sok, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    table, saver = sok.EmbeddingVariable(4, name="users"), sok.Saver()
    layer = sok.All2AllDenseEmbedding(None, 4, 1, 1, name="rows")
    model = tf.keras.Sequential([tf.keras.Input([1], dtype="int64"), layer])

    at = tmp_path / "users"
    for call, what in [
        (lambda: saver.dump(table, at), "dump of table 'users'"),
        (lambda: saver.dump(table, at, since="last"), "dump of table 'users'"),
        (lambda: saver.compact(table, at), "compact of table 'users'"),
        (lambda: saver.restore(table, at), "restore of table 'users'"),
        (lambda: sok.export_saved_model(model, tmp_path / "served"), "sok.export_saved_model"),
    ]:
        call()
        assert f"sok_like: {what}, rank 0: " in capsys.readouterr().err
