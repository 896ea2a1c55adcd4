"""Hides TensorFlow from every Python that has this folder on PYTHONPATH.

tools/check_gpu.sh rehearses so, because the machine with the device need not have TensorFlow.
"""

import importlib.machinery
import sys


class _PathFinder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in ("tensorflow", "keras", "tf_keras", "horovod"):
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = _PathFinder
