"""Dense and EinsumDense on a shard of the kernel.

A kernel dimension has a letter in the layer's equation, `...i,io->...o` for Dense. If the output
has it, each rank computes its part of the output from the whole input (column-parallel), and the
parts are gathered. If the input has it, each rank computes a term of the output from its part of
the input (row-parallel), and the terms are summed. A letter that both have does either half:

    kernel (None, 'model')               kernel ('model', None)
    x [b, i] --shared--> x . k_r         x [b, i] --own part--> x_r . k_r
    y_r [b, o/n] --gather--> y [b, o]    y_r [b, o] --summed--> y [b, o]
"""

from __future__ import annotations

import itertools
import re
import string
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.distribution.collectives import gather, own_part, shared, summed
from sok_like.distribution.sharded_variable import shard_of


class EinsumRule(NamedTuple):
    """How an einsum of an input and a kernel is done on one cut of the kernel.

    Attributes:
        equation: Of the layer.
        letter: Of the kernel's dimension that is cut.
        input_dim: Where the input has it, counted from the end if after an ellipsis; or None.
        output_dim: Where the output has it; or None.
    """

    equation: str
    letter: str
    input_dim: int | None
    output_dim: int | None

    @property
    def collectives(self) -> str:
        """What a training step exchanges, for `summary`."""
        if self.input_dim is None:
            return "all_gather of outputs, all_reduce of input gradients"
        if self.output_dim is None:
            return "all_reduce of outputs, all_gather of input gradients"
        return "all_gather of outputs, all_gather of input gradients"


def einsum_rule(equation: str, kernel: Any, batch_axis: str) -> EinsumRule | None:
    """The rule for a sharded kernel; None if there is none and it must be gathered.

    There is none for a kernel cut twice, or along the axis whose ranks hold different samples.
    """
    shard = shard_of(kernel)
    if shard is None or len(shard.placement.cuts) != 1 or shard.over_batch:
        return None
    cut = shard.placement.cuts[0]
    match = re.fullmatch(r"([\w.]+),(\w+)->([\w.]+)", equation.replace(" ", ""))
    if match is None or cut.axis == batch_axis:
        return None
    of_input, of_kernel, of_output = match.groups()
    letter = of_kernel[cut.dim]
    return EinsumRule(equation, letter, _dim(of_input, letter), _dim(of_output, letter))


def sharded_einsum(rule: EinsumRule, inputs: tf.Tensor, layer: Any, kernel: Any, bias: Any) -> Any:
    """`layer`'s output before the activation, whole on every rank."""
    cut = shard_of(kernel).placement.cuts[0]
    line = shard_of(kernel).mesh.along(cut.axis)
    name = shard_of(kernel).placement.path
    if rule.input_dim is None:
        inputs = shared(inputs, line, f"{name}_input")
    else:
        inputs = own_part(inputs, rule.input_dim, line, f"{name}_input")
    equation = without_ellipsis(rule.equation, inputs.shape.rank)
    outputs = tf.einsum(equation, inputs, tf.convert_to_tensor(kernel.local))
    if rule.output_dim is None:
        outputs = summed(outputs, line, f"{name}_output")
    else:
        # A bias cut as the output is needs no gathering of its own.
        if bias is not None and _lies_with(bias, cut, rule.output_dim):
            outputs, bias = outputs + bias.local, None
        outputs = gather(outputs, rule.output_dim, line, f"{name}_output")
    return outputs if bias is None else outputs + tf.convert_to_tensor(bias)


def without_ellipsis(equation: str, input_rank: int) -> str:
    """The equation with letters for `...`.

    TensorFlow 2.18 with oneDNN and several threads computes `...i,io->...o` wrongly.
    """
    of_input = equation.split(",")[0]
    free = (letter for letter in string.ascii_uppercase if letter not in equation)
    letters = "".join(itertools.islice(free, input_rank - len(of_input.replace("...", ""))))
    return equation.replace("...", letters)


def _dim(term, letter):
    """Position of a letter, negative where an ellipsis stands before it."""
    position = term.replace("...", ".").find(letter)
    if position < 0:
        return None
    dots = term.replace("...", ".").find(".")
    return position - len(term.replace("...", ".")) if 0 <= dots < position else position


def _lies_with(bias, cut, output_dim):
    """Whether the bias is cut along the last dimension, as the output is, and nowhere else."""
    shard = shard_of(bias)
    return (
        shard is not None
        and len(shard.placement.cuts) == 1
        and output_dim == -1
        and shard.placement.cut_along(-1) is not None
        and shard.placement.cuts[0].axis == cut.axis
        and shard.placement.cuts[0].length == cut.length
    )
