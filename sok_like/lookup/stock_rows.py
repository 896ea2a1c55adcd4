"""Rows of missing keys by TensorFlow's own ops, for graphs that run without this package.

The same computation as `cpp/core/initializer.h`, rounded in the same order: Philox4x32-10 (J.
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) on words of 32 bits. Each
word is in the low half of an int64; products wrap around, and masking leaves the word.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.native import libraries
from sok_like.table.keys import owner

CONSTANT, UNIFORM, NORMAL, TRUNCATED_NORMAL, DEFAULT_ROWS = range(5)  # InitializerKind

_WORD = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# A truncated normal is drawn again beyond two standard deviations, at most this often.
_DRAWS = 64


class MissingRows:
    """The rows of a table's missing keys: 0, or (`initial`) their rows after all weight decay."""

    def __init__(self, variable: Any, initial: bool):
        self.dim, self.kind, self.key, self.dtype = variable.dim, CONSTANT, [0, 0], tf.float32
        self.number, self.scale, self.limit, self.decay = np.float32([0, 0, 0, 1])
        self.default_rows: tf.Variable | None = None
        if not initial:
            return
        outputs = libraries.ops().sok_table_initializer(handle=variable.handle)
        kind, key, numbers, rows, is_row = (output.numpy() for output in outputs)
        self.kind, self.key = int(kind), key.tolist()
        self.number, self.scale, self.limit, self.decay = numbers
        if is_row:
            self.dtype = variable.row_dtype
        if self.kind == DEFAULT_ROWS:
            with tf.device("/CPU:0"):
                self.default_rows = tf.Variable(rows, trainable=False, name="default_rows")

    @property
    def alike(self) -> tuple[Any, ...]:
        """Tables for which this is equal compute their rows in the same ops, see `initial_rows`."""
        own = self.default_rows is not None
        return self.dim, self.kind, self.dtype.name, id(self) if own else 0


def initial_rows(
    missing: Sequence[MissingRows], keys: tf.Tensor, which: Any, decay: Any = None
) -> tf.Tensor:
    """Rows of int64 keys `[num_keys]` of tables that are alike, float32 `[num_keys, dim]`."""
    # `which`: the position of each key's table in `missing`, `decay`: the present factor of each.
    draws = _Draws(missing, keys, which)
    rows = draws.rows()
    if decay is not None:
        rows *= decay[0] if which is None else tf.gather(decay, which)[:, tf.newaxis]
    elif any(each.decay != 1 for each in missing):
        rows *= draws.of_keys([each.decay for each in missing])
    return tf.cast(tf.cast(rows, missing[0].dtype), tf.float32)


def by_key(numbers: Sequence[Any], which: Any, dtype: Any) -> Any:
    """The number of each key's table; one for all if it is the same."""
    values = tf.constant(np.array(numbers, dtype.as_numpy_dtype))
    return values[0] if len(set(numbers)) == 1 else tf.gather(values, which)


class _Draws:
    """The initial rows of some keys."""

    def __init__(self, missing, keys, which):
        self._missing, self._keys, self._which = missing, keys, which
        self._first, self._dim = missing[0], missing[0].dim

    def of_keys(self, numbers, dtype=tf.float32):
        """The number of each key's table, `[num_keys, 1]`, or one for all."""
        found = by_key(numbers, self._which, dtype)
        return found[:, tf.newaxis] if found.shape.rank else found

    def rows(self):
        kind, rows = self._first.kind, self._first.default_rows
        number, scale, limit = (
            self.of_keys([getattr(each, name) for each in self._missing])
            for name in ("number", "scale", "limit")
        )
        if kind == CONSTANT:
            return tf.zeros([tf.size(self._keys), self._dim]) + number
        if kind == DEFAULT_ROWS:
            return tf.gather(rows, owner(self._keys, rows.shape[0]))
        if kind == UNIFORM:
            # A float holds 24 bits exactly.
            words = self._words(0)[:, : self._dim]
            unit = tf.cast(_right(words, 8), tf.float32) * np.float32(2**-24)
            return tf.minimum(number + scale * unit, limit)
        normal = self._normals(0)
        return number + scale * (self._truncated(normal) if kind == TRUNCATED_NORMAL else normal)

    def _words(self, draw):
        """Random words of 32 bits, int64 `[num_keys, dim rounded up to 4]`."""
        keys, blocks = self._keys, -(-self._dim // 4)
        low, high = keys & _WORD, _right(keys, 32) & _WORD
        block = tf.zeros_like(keys)[:, tf.newaxis] + tf.range(blocks, dtype=tf.int64)
        zero = tf.zeros_like(block)
        draw = zero + tf.cast(draw, tf.int64)
        key = [
            self.of_keys([each.key[word] for each in self._missing], tf.int64) for word in (0, 1)
        ]
        words = _philox([low[:, tf.newaxis] + zero, high[:, tf.newaxis] + zero, block, draw], key)
        return tf.reshape(tf.stack(words, 2), [tf.size(keys), 4 * blocks])

    def _normals(self, draw):
        """Standard normals `[num_keys, dim]`; each pair of words gives two."""
        words, size = self._words(draw), tf.size(self._keys)
        pairs = tf.reshape(words, [size, words.shape[1] // 2, 2])
        both = _normal_pairs(pairs[:, :, 0], pairs[:, :, 1])
        return tf.reshape(tf.stack(both, 2), [size, words.shape[1]])[:, : self._dim]

    def _truncated(self, normal):
        def outside(values):
            return ~((values > -2.0) & (values < 2.0))

        def again(draw, values):
            return draw + 1, tf.where(outside(values), self._normals(draw), values)

        _, values = tf.while_loop(
            lambda draw, values: (draw < _DRAWS) & tf.reduce_any(outside(values)),
            again,
            [tf.constant(1, tf.int64), normal],
            shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, self._dim])],
        )
        return tf.where(outside(values), 0.0, values)


def decay_of(variable: Any) -> np.float32:
    """The factor by which weight decay has multiplied the initial rows of missing keys so far."""
    return libraries.ops().sok_table_initializer(handle=variable.handle).numbers.numpy()[3]


def _philox(counter, key):
    """Philox4x32-10 of four words, each in an int64, with a key of two."""
    c0, c1, c2, c3 = counter
    for i in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        round_key = [(key[j] + i * _WEYL[j]) & _WORD for j in (0, 1)]
        c0, c1, c2, c3 = (
            (_right(second, 32) & _WORD) ^ c1 ^ round_key[0],
            second & _WORD,
            (_right(first, 32) & _WORD) ^ c3 ^ round_key[1],
            first & _WORD,
        )
    return c0, c1, c2, c3


def _right(words, bits):
    return tf.bitwise.right_shift(words, tf.constant(bits, words.dtype))


def _float(text):
    return np.float32(float.fromhex(text))


def _series(t, *coefficients):
    """`c0 + t * (c1 + t * (c2 + t * c3))`, in this order."""
    *others, total = map(_float, coefficients)
    for coefficient in reversed(others):
        total = coefficient + t * total
    return total


def _log(x):
    """Natural logarithm of floats in (0, 1], as `LogOf` computes it."""
    bits = tf.bitcast(x, tf.int32)
    exponent = _right(bits - 0x3F3504F3, 23)
    m = tf.bitcast(bits - exponent * (1 << 23), tf.float32)
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    tail = t * _series(t, "0x1.555556p-2", "0x1.99999ap-3", "0x1.24924ap-3", "0x1.c71c72p-4")
    return tf.cast(exponent, tf.float32) * _float("0x1.62e430p-1") + 2.0 * (s + s * tail)


def _normal_pairs(bits0, bits1):
    """Two standard normals from two words (G. Box and M. Muller, 1958), as `NormalPair` does."""
    unit = tf.cast(_right(bits0, 8) + 1, tf.float32) * np.float32(2**-24)
    radius = tf.sqrt(-2.0 * _log(unit))
    quarter = _right((bits1 + 0x20000000) & _WORD, 30)
    rest = (bits1 * 4) & _WORD
    rest = _right(tf.where(rest >= 2**31, rest - 2**32, rest), 8)
    angle = tf.cast(rest, tf.float32) * _float("0x1.921fb6p-24")
    t = angle * angle
    odd_terms = ("-0x1.555556p-3", "0x1.111112p-7", "-0x1.a01a02p-13", "0x1.71de3ap-19")
    even_terms = ("0x1.555556p-5", "-0x1.6c16c2p-10", "0x1.a01a02p-16", "-0x1.27e4fcp-22")
    sine = angle + angle * (t * _series(t, *odd_terms))
    cosine = 1.0 + t * (-0.5 + t * _series(t, *even_terms))
    odd = (quarter & 1) > 0
    x, y = tf.where(odd, sine, cosine), tf.where(odd, cosine, sine)
    x = tf.where((quarter == 1) | (quarter == 2), -x, x)
    y = tf.where(quarter >= 2, -y, y)
    return radius * x, radius * y
