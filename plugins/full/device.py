"""Dense attention on the GPU: nothing to index, nothing to select."""

from __future__ import annotations

from torch import Tensor

from kvseek.plugins.batch import DeviceBatch
from kvseek.plugins.contract import DeviceIndex


class DeviceFullIndex(DeviceIndex):
    """Keeps nothing; every request is attended densely."""

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; there is nothing to index."""

    def plan(self, length: int) -> tuple[int, ...]:
        """The kernels need no numbers."""
        return ()

    def attended(self, length: int) -> int:
        """All of them."""
        return length

    def launch_select(self, queries: Tensor, batch: DeviceBatch) -> None:
        """Nothing is launched: None stands for every row."""

    def stage(self, slot: int, start: int, keys: Tensor) -> None:
        """See DeviceIndex.stage; there is nothing to encode."""

    def commit(self, slot: int, start: int, count: int) -> None:
        """See DeviceIndex.commit; nothing was staged."""

    @property
    def bytes_per_token(self) -> float:
        """Nothing is stored."""
        return 0.0
