"""The core on NumPy arrays, without TensorFlow.

Keys are one-dimensional integer arrays; every key in the range of `key_dtype` is legal. Rows are
float32.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

def set_num_threads(num_threads: int) -> None:
    """Sets the number of threads that later calls run on, the caller included."""

def num_threads() -> int: ...

class SlotSpec:
    """A slot variable: `width` floats kept behind each row.

    Args:
        name: Unique within a table.
        width: Floats per row, positive.
        initial: Value in a new row.
        saved: False for derived state that an export leaves out.
    """

    def __init__(
        self, name: str, width: int, *, initial: float = 0.0, saved: bool = True
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def initial(self) -> float: ...
    @property
    def saved(self) -> bool: ...

class Table:
    """One rank's shard of a table. Safe to use from several threads.

    Args:
        name: Enters the random streams of initial rows.
        dim: Floats in a row's embedding, positive.
        key_dtype: `"int64"`, `"int32"`, `"uint64"` or `"uint32"`.
        initializer: `"uniform"` over [a, b), `"normal"` and `"truncated_normal"` with mean `a` and
            standard deviation `b`, `"constant"` a, or `"default_rows"`.
        default_rows: `[num_default_rows, dim]`; the initial row of a key is the one at the key, as
            unsigned, modulo their number.
        seed: An initial row depends on `seed`, `name`, key and column alone.
        initial_capacity: Keys to make room for at once.
        max_capacity: Most keys the table may hold; 0 for no bound.
        use_hashtable: False for keys in `[0, max_capacity * world_size)` with
            `key % world_size == rank`. All their rows exist from the start.

    Raises:
        ValueError: An argument is out of its range; the message names it.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        key_dtype: str = "int64",
        initializer: str = "uniform",
        a: float = -0.05,
        b: float = 0.05,
        default_rows: ArrayLike | None = None,
        seed: int = 0,
        initial_capacity: int = 0,
        max_capacity: int = 0,
        use_hashtable: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def key_dtype(self) -> str: ...
    @property
    def size(self) -> int:
        """Keys present."""
    def __len__(self) -> int: ...
    @property
    def capacity(self) -> int:
        """Keys that fit before the index grows."""
    @property
    def slots(self) -> list[SlotSpec]: ...
    def configure_slots(self, specs: Sequence[SlotSpec]) -> None:
        """Lays slot variables behind the rows, keeping those of equal name and width."""
    def find(self, keys: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Reads rows; a missing key reads its initial row and is not inserted.

        Args:
            keys: `[num_keys]`, may repeat.

        Returns:
            Rows `[num_keys, dim]`, and whether each key was present `[num_keys]`.

        Raises:
            ValueError: A key does not fit in `key_dtype`.
            IndexError: Without hashtable, a key is outside the range of this rank.
        """
    def find_or_insert(self, keys: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Reads rows, inserting missing keys with their initial row.

        Returns:
            Rows `[num_keys, dim]`, and a flag that is true at the first position of each new key.

        Raises:
            ValueError: `max_capacity` would be exceeded; nothing was inserted.
        """
    def assign(self, keys: ArrayLike, rows: ArrayLike) -> None:
        """Writes rows `[num_keys, dim]`, inserting missing keys; of equal keys the last wins."""
    def erase(self, keys: ArrayLike) -> int:
        """Removes keys and returns how many were present."""
    def clear(self) -> None:
        """Removes all keys and frees their memory."""
    def reserve(self, num_keys: int) -> None:
        """Makes room in the index for `num_keys` keys in all."""
    def export(
        self, with_slots: bool = True
    ) -> tuple[NDArray[Any], NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """Copies out keys, ascending as unsigned; rows; and saved slot variables by name.

        Returns:
            Keys `[size]`, rows `[size, dim]`, and slot rows `[size, width]` by name.
        """
    def import_(
        self, keys: ArrayLike, rows: ArrayLike, slots: Mapping[str, ArrayLike] | None = None
    ) -> None:
        """Inserts or overwrites keys with rows `[num_keys, dim]` and slots `[num_keys, width]`.

        Slot variables that `slots` lacks get their initial value; those that the table lacks are
        added.
        """
    def initial_rows(self, keys: ArrayLike) -> NDArray[np.float32]:
        """The rows `[num_keys, dim]` that missing keys read."""
    def stats(self) -> dict[str, int | float]:
        """Size, load factor, probe lengths and bytes. Visits every key."""

def _hash_pieces(key: int) -> tuple[int, int, int]:
    """Index shard, bucket bits and digest of a key."""

def _philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 of four counter words and two key words."""
