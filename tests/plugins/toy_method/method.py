"""The best blocks: codes choose among the rows of blocks whose mean keys answer best."""

from functools import partial

from torch import Tensor

from kvseek.core.index_context import IndexContext
from kvseek.kernels.reference.codes.key_codes import QueryLanes, mean_products
from kvseek.plugins.contract import Index, Traits
from kvseek.plugins.ranking import CodedIndex, best_positions, rotation_codebook

from .config import Config


class BlocksIndex(CodedIndex):
    """Codes of 2 bits a channel, which keep the mean key of each block of rows as well."""

    config: Config

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context, bits=2)

    def candidates(self, lanes: QueryLanes, slot: int, length: int) -> Tensor:
        """Take the blocks by the largest product of their means with a query of the group, the last one in part."""
        means = mean_products(self.codes.read(slot, length), lanes) * lanes.steps
        return best_positions(means.amax(dim=1), min(length, self.config.candidates * self.config.top_k))


def traits(config: Config) -> Traits:
    """Engines on a GPU refuse the method: it has no kernels for them."""
    signs = partial(rotation_codebook, 0)
    return Traits(devices=("cpu",), prefix_reuse="entries", codebooks=signs)


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return BlocksIndex(context)
