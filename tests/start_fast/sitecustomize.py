"""Python runs this file as it starts, where its folder is on the path: see `speed.start_fast`."""

import sys


class _NotWithKeras:
    """Finds no plotting and no data frames where Keras looks for them, which no test gives it.

    They are a fifth of a process's start. A program that wants them itself finds them.
    """

    def find_spec(self, name, path=None, target=None):
        if name in ("matplotlib", "pandas"):
            loading = [sys.modules.get(keras) for keras in ("keras", "tf_keras")]
            if any(module and module.__spec__._initializing for module in loading):
                raise ModuleNotFoundError(f"{__file__} leaves {name} out", name=name)


sys.meta_path.insert(0, _NotWithKeras())
