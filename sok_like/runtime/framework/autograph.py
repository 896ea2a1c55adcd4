"""AutoGraph takes the functions of this package as they are, as it takes TensorFlow's and Keras'.

None of them branches on a tensor by `if` or `while`, so there is nothing to convert. Conversion
would rewrite each of them, and all that they call, when a user's `tf.function` is traced. The first
trace of a lookup and update of eight tables takes 2.0 to 2.5 s with it, 0.3 to 0.4 s without.
"""

from tensorflow.python.autograph.core import config

from sok_like.runtime.framework import hooks


@hooks.at_init
def _install():
    rules = (config.DoNotConvert(__name__.partition(".")[0]), *config.CONVERSION_RULES)
    hooks.put(config, "CONVERSION_RULES", rules, "AutoGraph takes this package as it is")
