"""What SOK 1.x's programs ask of an embedding variable."""

from __future__ import annotations

from typing import Any


class Sok1Names:
    """Names of an EmbeddingVariable in SOK 1.x."""

    handle: Any
    _options: dict

    @property
    def m_var_name(self) -> str:
        """The name in the names of a dump's files."""
        return self._options["name"]

    @property
    def emb_handle(self) -> Any:
        """The resource handle of the table."""
        return self.handle

    @property
    def values(self) -> tuple[Any]:
        """The variable of each replica in this process, of which there is one."""
        return (self,)
