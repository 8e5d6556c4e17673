"""The seam to what torch's `DTensor` does behind its functions: caches, scatters, handlers.

`tests/runtime/test_seam.py` fails when one of these names changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import loss

from lightning_pipe.split.patching import attributes


def forget_layouts() -> None:
    """Forgets what torch remembers of operations on `DTensor`s.

    It is remembered with the groups of its first time, and a mesh of an earlier run, whose groups
    are gone, is equal to one of this run.
    """
    _clear_sharding_prop_cache()


@contextmanager
def distributing_locally() -> Iterator[None]:
    """Lets `distribute_tensor` take its part of what each process has, which is the same on all.

    It scatters the value of the first process otherwise, which no recipe could do again.
    """

    def scatter(output: Tensor, pieces: list[Tensor], mesh: DeviceMesh, **where: Any) -> None:
        output.copy_(pieces[mesh.get_local_rank(where.get("mesh_dim", 0))])

    def broadcast(value: Tensor, *_: Any, **__: Any) -> None:
        return

    replaced = [("mesh_scatter", scatter), ("mesh_broadcast", broadcast)]
    with attributes([(placement_types, name, instead) for name, instead in replaced]):
        yield


@contextmanager
def backwards_of_parallel_losses() -> Iterator[None]:
    """Lets the backward of a loss under torch's `loss_parallel` run after that context has ended.

    It handles the operators of such losses while it is open, and says of it that the backward has
    to be inside. A schedule runs the backwards of a step between its forwards.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    own: Callable[[], None] = loss._disable_custom_loss_ops
    backwards = {op for op in loss.customized_loss_ops if "backward" in op.name()}

    def end_of_forward() -> None:
        kept = {op: handlers[op] for op in backwards if op in handlers}
        own()
        handlers.update(kept)

    try:
        with attributes([(loss, "_disable_custom_loss_ops", end_of_forward)]):
            yield
    finally:
        for op in backwards:
            handlers.pop(op, None)


__all__ = ["backwards_of_parallel_losses", "distributing_locally", "forget_layouts"]
