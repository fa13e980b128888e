# SPDX-License-Identifier: Apache-2.0
"""The plain way to get rows: load the whole table, then index it."""

import torch
from safetensors import safe_open

from .locate import TableLocation


class LoadedTable:
    """A table in memory, with the interface of ``gather.TableFiles``."""

    def __init__(self, location: TableLocation) -> None:
        self.location = location
        parts = []
        for shard in location.shards:
            with safe_open(shard.path, framework="pt") as file:
                parts.append(file.get_tensor(shard.name))
        # Bytes, because fp8 tensors can neither be concatenated nor indexed.
        self._rows = torch.cat([part.view(torch.uint8) for part in parts])

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``[*ids.shape, dim]`` for int64 ``ids`` of any shape."""
        picked = self._rows[ids.reshape(-1)]
        return picked.view(self.location.dtype).view(*ids.shape, self.location.dim)

    def close(self) -> None:
        """Drop the table."""
        del self._rows
