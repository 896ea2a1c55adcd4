"""Attributes of an embedding variable that programs of SOK 1.x use."""

from __future__ import annotations

from typing import Any


class Sok1Names:
    """Attributes of an EmbeddingVariable by their names in SOK 1.x."""

    handle: Any
    _options: dict

    @property
    def m_var_name(self) -> str:
        """The table's name, as it appears in names of dump files."""
        return self._options["name"]

    @property
    def emb_handle(self) -> Any:
        """The resource handle of the table."""
        return self.handle

    @property
    def values(self) -> tuple[Any]:
        """The variables of the replicas in this process: there is one."""
        return (self,)
