"""Dense, EinsumDense and convolutions on a shard of the kernel.

Each kernel dimension has a letter in the layer's equation, `...i,io->...o` for Dense. If the
sharded dimension's letter is in the output, each rank computes its part of the output from the
whole input (column-parallel), and the parts are gathered. If it is in the input, each rank computes
a term of the output from its part of the input (row-parallel), and the terms are summed. If it is
in both, the input is split and the output gathered:

    kernel (None, 'model')               kernel ('model', None)
    x [b, i] --shared--> x . k_r         x [b, i] --own shard--> x_r . k_r
    y_r [b, o/n] --gather--> y [b, o]    y_r [b, o] --summed--> y [b, o]

A convolution has two such dimensions, the channels of its input and of its output.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.distribution.collectives import gather, own_shard, shared, summed, with_length
from sok_like.distribution.sharded_variable import shard_of


class CutProduct(NamedTuple):
    """A kernel of which one dimension is sharded, and the same dimension of inputs and outputs.

    Each is None if they do not have it, and counted from the end if it is after an ellipsis.
    """

    kernel: Any  # the variable
    input_dim: int | None
    output_dim: int | None

    @property
    def collectives(self) -> str:
        """The collectives of a training step, for `summary`."""
        forward = "all_gather" if self.output_dim is not None else "all_reduce"
        back = "all_gather" if self.input_dim is not None else "all_reduce"
        return f"{forward} of outputs, {back} of input gradients"


def only_cut(kernel: Any) -> Any:
    """The `Cut` of a variable with exactly one, unless it is along the batch axis; else None."""
    shard = shard_of(kernel)
    if shard is None or len(shard.placement.cuts) != 1 or shard.over_batch:
        return None
    return shard.placement.cuts[0]


def einsum_product(equation: str, kernel: Any) -> CutProduct | None:
    """The rule for a sharded kernel; None if there is no rule and it must be gathered."""
    cut = only_cut(kernel)
    match = re.fullmatch(r"([\w.]+),(\w+)->([\w.]+)", equation.replace(" ", ""))
    if cut is None or match is None:
        return None
    of_input, of_kernel, of_output = match.groups()
    letter = of_kernel[cut.dim]
    return CutProduct(kernel, _dim(of_input, letter), _dim(of_output, letter))


def run_product(
    product: CutProduct,
    inputs: tf.Tensor,
    bias: Any,
    compute: Callable,
    as_addend: Callable = tf.convert_to_tensor,
) -> tf.Tensor:
    """A layer's output before the activation, whole on every rank.

    `compute` makes outputs without the bias, from inputs and this rank's kernel. `as_addend` shapes
    a bias so that it can be added to them.
    """
    shard: Any = shard_of(product.kernel)
    cut = only_cut(product.kernel)
    line, name = shard.mesh.along(cut.axis), shard.placement.path
    if product.input_dim is None:
        inputs = shared(inputs, line, f"{name}_input")
    else:
        inputs = own_shard(inputs, product.input_dim, line, f"{name}_input")
    outputs = compute(inputs, tf.cast(product.kernel.local, inputs.dtype))
    if product.output_dim is None:
        outputs = summed(outputs, line, f"{name}_output")
    else:
        if rides_along(product, bias) is not None:
            outputs, bias = outputs + as_addend(tf.cast(bias.local, outputs.dtype)), None
        outputs = gather(outputs, product.output_dim, line, f"{name}_output")
        outputs = with_length(outputs, product.output_dim, cut.length)
    return outputs if bias is None else outputs + as_addend(tf.cast(bias, outputs.dtype))


def rides_along(product: CutProduct, bias: Any) -> Any:
    """The bias if it is a vector sharded like the output, which needs no collective; else None."""
    if bias is None or product.output_dim is None or len(bias.shape) != 1:
        return None
    return bias if only_cut(bias) == dataclasses.replace(only_cut(product.kernel), dim=0) else None


def einsum(equation: str) -> Callable:
    """`compute` for `run_product`."""

    def compute(inputs, kernel):
        # With letters for `...`: TensorFlow 2.18 with oneDNN and several threads computes
        # `...i,io->...o` wrongly.
        of_input = equation.split(",")[0]
        free = (letter for letter in string.ascii_uppercase if letter not in equation)
        num_letters = inputs.shape.rank - len(of_input.replace("...", ""))
        letters = "".join(itertools.islice(free, num_letters))
        return tf.einsum(equation.replace("...", letters), inputs, kernel)

    return compute


def _dim(term, letter):
    """Position of a letter, counted from the end if an ellipsis is before it."""
    term = term.replace("...", ".")
    position, dots = term.find(letter), term.find(".")
    if position < 0:
        return None
    return position - len(term) if 0 <= dots < position else position
