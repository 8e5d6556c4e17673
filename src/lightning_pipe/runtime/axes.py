"""Which processes of a job belong together: ranks of a pipeline, its copies, parts of a stage.

By default the parts of a stage are neighbours, because they exchange most, then come the ranks of a
pipeline, and copies are furthest apart, because they meet once in an optimizer step:

    D = 2, P = 2, T = 2     copy 0               copy 1
    stage 1                 ranks 0 1            ranks 4 5
    stage 0                 ranks 2 3            ranks 6 7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipe.errors import ConfigError

DATA, PIPELINE, TENSOR = "data_parallel", "pipeline", "tensor_parallel"
ORDER = (DATA, PIPELINE, TENSOR)


@dataclass(frozen=True, slots=True)
class Axes:
    """The sizes of a mesh of processes, and how they are numbered.

    Attributes:
        pipeline: Ranks of a pipeline.
        data_parallel: Copies of it.
        tensor_parallel: Processes that share the tensors of a stage.
        order: The names of the axes, outermost first: along the last one, neighbours have global
            ranks that follow each other.

    Raises:
        ConfigError: The order does not name each axis once.
    """

    pipeline: int = 1
    data_parallel: int = 1
    tensor_parallel: int = 1
    order: tuple[str, ...] = ORDER

    def __post_init__(self) -> None:
        check_order(self.order)

    @property
    def num_ranks(self) -> int:
        """Processes of the job."""
        return self.pipeline * self.data_parallel * self.tensor_parallel

    def size(self, axis: str) -> int:
        """Processes along an axis."""
        return {
            DATA: self.data_parallel,
            PIPELINE: self.pipeline,
            TENSOR: self.tensor_parallel,
        }[axis]

    def stride(self, axis: str) -> int:
        """How far apart the global ranks of neighbours along an axis are."""
        step = 1
        for inner in self.order[self.order.index(axis) + 1 :]:
            step *= self.size(inner)
        return step

    def place(self, axis: str, global_rank: int) -> int:
        """Where a process is along an axis."""
        return global_rank // self.stride(axis) % self.size(axis)

    def first(self, axis: str, global_rank: int) -> int:
        """The first of the processes that are along an axis with one of them."""
        return global_rank - self.place(axis, global_rank) * self.stride(axis)

    def lines(self, axis: str) -> list[list[int]]:
        """The processes along an axis, for each place on the other axes."""
        starts = [rank for rank in range(self.num_ranks) if not self.place(axis, rank)]
        step = self.stride(axis)
        return [[start + step * place for place in range(self.size(axis))] for start in starts]

    def __str__(self) -> str:
        sizes = f"pipeline_parallel_size={self.pipeline} x data_parallel_size={self.data_parallel}"
        if self.tensor_parallel == 1:
            return sizes
        return f"{sizes} x tensor_parallel_size={self.tensor_parallel}"


def check_order(order: Sequence[str]) -> tuple[str, ...]:
    """The names of the axes, outermost first.

    Raises:
        ConfigError: One is missing, unknown or there twice.
    """
    if isinstance(order, str) or sorted(order) != sorted(ORDER):
        raise ConfigError(
            f"mesh_order={order!r}: give the names {', '.join(map(repr, ORDER))}, each once, "
            "outermost first"
        )
    return tuple(order)


__all__ = ["DATA", "ORDER", "PIPELINE", "TENSOR", "Axes", "check_order"]
