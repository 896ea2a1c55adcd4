"""Loading of the two shared libraries: what loads, what is refused, and the error messages."""

import concurrent.futures
import re
import subprocess
import sys
import threading

import pytest

from sok_like.runtime.native import libraries

REAL_LIBRARY = libraries.ops_path()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty package folder, with nothing loaded; the real folder's state returns afterwards."""
    monkeypatch.setattr(libraries, "_folder", tmp_path)
    monkeypatch.setattr(libraries, "_loaded", {})
    return tmp_path


def write_library(folder, name, tensorflow, cpu):
    text = f"\x7fELF...sok_build_info{{tensorflow={tensorflow};cpu={cpu}}}..."
    (folder / name).write_bytes(text.encode())


def test_libraries_load_once():
    assert libraries.ops() is libraries.ops()
    assert libraries.core() is libraries.core()
    assert libraries.core().__name__ == "sok_like._core"


def test_import_of_native_loads_nothing():
    program = (
        "import sys, sok_like.runtime.native.libraries\n"
        "print(sorted({'tensorflow', 'horovod', 'sok_like._core'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("load, name", [(libraries.ops, "_ops.so"), (libraries.core, "_core")])
def test_missing_library_says_how_to_build(folder, load, name):
    with pytest.raises(
        ImportError, match=f"{re.escape(str(folder / name))}.*is missing.*make venv"
    ):
        load()


def test_sources_that_hide_the_installed_package_are_named(folder, tmp_path, monkeypatch):
    # After `pip install .`, Python started in the clone finds its sources first.
    installed = tmp_path / "site-packages" / folder.name
    installed.mkdir(parents=True)
    write_library(installed, "_ops.so", "2.18.1", " avx")
    monkeypatch.syspath_prepend(installed.parent)
    with pytest.raises(
        ImportError, match=f"installed one, {re.escape(str(installed))}.*another folder"
    ):
        libraries.ops()


def test_a_clone_holds_libraries_for_several_tensorflows(folder):
    running = libraries._tensorflow_version()  # as pip writes it, also that of a nightly
    write_library(folder, "_ops.so", "2.17.0", "")
    write_library(folder, "_ops.2.17.0.so", "2.17.0", "")
    assert libraries.ops_path() == folder / "_ops.so"
    write_library(folder, f"_ops.{running}.so", running, " avx9000")
    assert libraries.ops_path() == folder / f"_ops.{running}.so"
    with pytest.raises(ImportError, match=rf"_ops\.{running}\.so was compiled .* with avx9000"):
        libraries.ops()


@pytest.mark.parametrize(
    "tensorflow, cpu, message",
    [
        ("2.17.0", " avx", "{running}.*built for TensorFlow 2.17.0.*pip"),
        ("{running}", " avx9000 fma9", "with avx9000, fma9, which .* lacks.*SOK_MARCH=native"),
        ("{running}", "", "could not be loaded.*make venv"),  # it is damaged
        (None, None, "does not say what it was built for"),
    ],
)
def test_refused_libraries(folder, tensorflow, cpu, message):
    running = libraries._tensorflow_version()
    if tensorflow is None:
        (folder / "_ops.so").write_bytes(b"\x7fELF and nothing more")
    else:
        write_library(folder, "_ops.so", tensorflow.format(running=running), cpu)
    with pytest.raises(ImportError, match=message.format(running=running)):
        libraries.ops()


def test_failure_is_not_remembered(folder, monkeypatch):
    with pytest.raises(ImportError):
        libraries.ops()
    # A link, not a copy: the loader knows the file again, and kernels register only once.
    (folder / "_ops.so").symlink_to(REAL_LIBRARY)
    assert libraries.ops() is not None


def test_threads_load_once(monkeypatch):
    monkeypatch.setattr(libraries, "_loaded", {})
    loads, start = [], threading.Barrier(4)

    def use(_):
        start.wait()
        libraries._load_once("thing", lambda: loads.append(1) or libraries)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert len(loads) == 1


@pytest.mark.parametrize(
    "built_for, running, fits",
    [
        ("2.23.0-dev20261026", "2.23.0.dev20261026", True),
        ("2.23.0.dev20261026", "2.23.0-dev20261026", True),
        ("2.18.0rc1", "2.18.0-rc1", True),
        ("2.18.0", "2.18.0-rc1", False),
        ("2.23.0-dev20261026", "2.23.0-dev20261027", False),
    ],
)
def test_versions_are_compared_as_versions(folder, monkeypatch, built_for, running, fits):
    import tensorflow as tf

    monkeypatch.setattr(tf.version, "VERSION", running)
    write_library(folder, "_ops.so", built_for, " avx")
    # A file that fits is no library, which TensorFlow says.
    message = "could not be loaded" if fits else "must be built for the running TensorFlow"
    with pytest.raises(ImportError, match=message):
        libraries.ops()
