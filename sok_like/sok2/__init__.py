"""The API of SOK 2.x: `from sok_like import sok2 as sok`.

    sok.init()
    table = sok.DynamicVariable(dimension=16, initializer="random", var_type="hbm")
    embeddings = sok.lookup_sparse(table, sp_ids, combiners="sum")

Names, arguments and defaults are those of release 2.1; docs/sok2.md says what differs. Importing
this loads no TensorFlow: a name is loaded when first used.
"""

from sok_like.runtime.framework import lazy_modules

__all__, __getattr__, __dir__ = lazy_modules.names(__name__)
