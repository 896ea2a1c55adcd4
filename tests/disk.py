"""A folder on a disk, which that of temporary files may not be."""

import contextlib
import pathlib
import tempfile

OUT = pathlib.Path(__file__).parent.parent / "out"


@contextlib.contextmanager
def folder():
    """The path of an empty folder, removed at the end."""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as made:
        yield pathlib.Path(made)
