"""Where a table keeps its rows: in memory, or on disk with the rows in use in memory."""

import dataclasses
import os
import re
from typing import Any

from sok_like.runtime.checks import as_integer, require

STORAGE_TYPES = ("DRAM", "HBM", "DRAM_SSDHASH")
CACHE_STRATEGIES = ("LRU", "LFU")


@dataclasses.dataclass(frozen=True)
class StorageOption:
    """Where rows are kept: in the memory of the table's device, or on disk.

    With "DRAM_SSDHASH" the index and the rows in use stay in memory; all rows with their slot rows
    are in a file, one per table and rank. Values are bit-identical to those of a table in memory.
    The file is temporary: it has no name and ends with the process. Dumps are permanent.

    Args:
        storage_type: None, "DRAM", "HBM" or "DRAM_SSDHASH", or an enum member of that name.
        storage_path: With "DRAM_SSDHASH" a directory on a disk; created if it is missing.
        storage_size: With "DRAM_SSDHASH" `[bytes of rows in memory]` or `[bytes of rows in memory,
            maximum bytes of the file]`, per table and rank; further entries must be 0. One batch
            may exceed the first. It does not include the system's page cache, which is freed when
            memory is short. None: `[2**30]`, as in DeepRec.
        cache_strategy: With "DRAM_SSDHASH": which rows leave memory first, in blocks of 4 KiB.
            "LFU" or None: those used least often. "LRU": those unused for longest.
        layout: Must be None.

    Raises:
        ValueError: an argument is not one of these values, or would be ignored.
    """

    storage_type: Any = None
    storage_path: str | None = None
    storage_size: Any = None
    cache_strategy: Any = None
    layout: Any = None

    def __post_init__(self):
        name = getattr(self.storage_type, "name", self.storage_type)
        require(
            name is None or name in STORAGE_TYPES,
            "storage_type",
            f"None or one of {STORAGE_TYPES}. For a table that is larger than memory, on PMEM or "
            "SSD, use DRAM_SSDHASH, which keeps rows in a file and those in use in host memory",
            self.storage_type,
        )
        object.__setattr__(self, "storage_type", name)
        require(self.layout is None, "layout", "None", self.layout)
        if self.is_on_disk:
            self._check_disk()
            return
        for argument in ("storage_path", "storage_size", "cache_strategy"):
            value = getattr(self, argument)
            required = "None: only storage_type DRAM_SSDHASH has rows on disk"
            require(value is None, argument, required, value)

    def _check_disk(self):
        path = self.storage_path
        is_path = isinstance(path, (str, os.PathLike)) and os.fspath(path) != ""
        require(is_path, "storage_path", "a directory on a disk for DRAM_SSDHASH", path)
        # The file is mapped into memory, which no other file system can do. One slash: pathlib.
        has_scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path))
        require(not has_scheme, "storage_path", "a directory on a disk, without a scheme", path)
        object.__setattr__(self, "storage_path", os.fspath(path))
        entries = 2**30 if self.storage_size is None else self.storage_size
        entries = entries if isinstance(entries, (list, tuple)) else [entries]
        sizes = [as_integer(entry) for entry in entries]
        fits = 0 < len(sizes) <= 4 and all(n is not None and 0 <= n < 2**63 for n in sizes)
        required = (
            "[bytes of rows in memory] or [bytes of rows in memory, maximum bytes of the file], "
            "optionally followed by zeros"
        )
        fits = fits and bool(sizes[0]) and not any(sizes[2:])
        require(fits, "storage_size", required, self.storage_size)
        object.__setattr__(self, "storage_size", tuple(sizes))
        strategy = getattr(self.cache_strategy, "name", self.cache_strategy)
        required, legal = f"None or one of {CACHE_STRATEGIES}", (None, *CACHE_STRATEGIES)
        require(strategy in legal, "cache_strategy", required, self.cache_strategy)
        object.__setattr__(self, "cache_strategy", strategy)

    @property
    def is_on_disk(self) -> bool:
        """Whether rows are in a file."""
        return self.storage_type == "DRAM_SSDHASH"

    def attributes(self) -> dict[str, Any]:
        """The option as attributes of the op that makes a table."""
        if not self.is_on_disk or self.storage_path is None:
            return {}
        return {
            # Absolute, as the file is made again when slot rows are added or the content is
            # replaced.
            "storage_path": os.path.abspath(self.storage_path),
            "storage_memory": self.storage_size[0],
            "storage_file": self.storage_size[1] if len(self.storage_size) > 1 else 0,
            "storage_lfu": self.cache_strategy != "LRU",
        }
