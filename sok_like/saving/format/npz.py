"""Where the arrays of an uncompressed `.npz` lie, so that they can be written in any order.

    local header | .npy header, elements | local header | ... | directory | its end

All sizes are known before anything is written. The local headers and the directory hold CRC-32, so
they are written last. Every size is written as in zip files beyond 4 GiB, whatever it is.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

_VERSION = 45  # of zip: sizes of 64 bits
_DATE = 1 << 5 | 1  # 1980-01-01
_LARGE = 0xFFFFFFFF  # the size is in the extra field
_LOCAL, _ENTRY = struct.Struct("<4s5H3L2HHH2Q"), struct.Struct("<4s2B5H3L5H2LHH3Q")
_END = struct.Struct("<4sQ2H2L4Q4sLQL4s4H2LH")


class Layout:
    """The places of arrays in a file.

    Args:
        arrays: By name: shape and dtype.

    Attributes:
        begins: By name, where the elements begin.
        size: Bytes of the file.
    """

    def __init__(self, arrays: Mapping[str, tuple[tuple[int, ...], Any]]):
        self.begins: dict[str, int] = {}
        self._members: list[tuple[bytes, int, int, int]] = []  # name, header, data, end
        self._npy: dict[str, bytes] = {}
        at = 0
        for name, (shape, dtype) in arrays.items():
            file_name, header = f"{name}.npy".encode(), io.BytesIO()
            descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
            fields = {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
            np.lib.format.write_array_header_1_0(header, fields)
            self._npy[name] = header.getvalue()
            data = at + _LOCAL.size + len(file_name)
            self.begins[name] = data + len(self._npy[name])
            end = self.begins[name] + math.prod(shape) * np.dtype(dtype).itemsize
            self._members.append((file_name, at, data, end))
            at = end
        self._directory = at
        entries = sum(_ENTRY.size + len(name) for name, *_ in self._members)
        self.size = at + entries + _END.size

    def npy_headers(self) -> Iterator[tuple[int, bytes]]:
        """Position and bytes of each `.npy` header."""
        for name, header in self._npy.items():
            yield self.begins[name] - len(header), header

    def zip_headers(self, crc: Callable[[int, int], int]) -> Iterator[tuple[int, bytes]]:
        """Position and bytes of what makes it a zip file.

        Args:
            crc: The CRC-32 of the bytes between two positions.
        """
        directory = b""
        for name, at, data, end in self._members:
            size, checksum = end - data, crc(data, end)
            common = _VERSION, 0, 0, 0, _DATE, checksum, _LARGE, _LARGE, len(name)
            fixed = _LOCAL.pack(b"PK\3\4", *common, 20, 1, 16, size, size)
            yield at, fixed[:30] + name + fixed[30:]
            entry = _ENTRY.pack(
                *(b"PK\1\2", _VERSION, 3, *common, 28, 0, 0, 0, 0o600 << 16, _LARGE),
                *(1, 24, size, size, at),
            )
            directory += entry[:46] + name + entry[46:]
        count, end = len(self._members), self._directory + len(directory)
        yield (
            self._directory,
            directory
            + _END.pack(
                *(b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, len(directory)),
                *(self._directory, b"PK\6\7", 0, end, 1),
                *(b"PK\5\6", 0, 0, count, count, _LARGE, _LARGE, 0),
            ),
        )
