"""Which of the processes of a run this one is."""

import os
import socket
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from .capture import devices

__all__ = ["Process", "rank_and_world_size"]


@dataclass(frozen=True, slots=True)
class Process:
    rank: int
    world_size: int
    host: str
    device: str
    """Where the weights of the model are, as "cuda:1" or "cpu"."""

    @classmethod
    def of(cls, model: nn.Module) -> "Process":
        """This one, which has a model."""
        there = (str(device) for module in model.modules() for device in devices(module))
        return cls(*rank_and_world_size(), socket.gethostname(), next(there, "cpu"))

    @property
    def name(self) -> str:
        """As "rank 1 of 4 (node-7, cuda:1)"."""
        return f"rank {self.rank} of {self.world_size} ({self.host}, {self.device})"


def rank_and_world_size() -> tuple[int, int]:
    """Of this process: as torch.distributed has it, or else as a launcher has told it to be."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size):
        return int(rank), int(world_size)
    return 0, 1
