"""What a run writes and reads: checkpoints, whole or of which each rank writes its part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipe import _lightning as seam
from lightning_pipe.errors import CheckpointError
from lightning_pipe.hyperparameters import with_weights
from lightning_pipe.manners import AtomicCheckpointIO
from lightning_pipe.readings import PipelineReadings
from lightning_pipe.runtime.shards import whole_tensor
from lightning_pipe.sharded import ShardedCheckpoints, make_group, refuse_io
from lightning_pipe.split.parted import is_parted
from lightning_pipe.split.tree import map_tensors, tensors
from lightning_pipe.states import SpreadModel


class PipelineCheckpoints(PipelineReadings):
    """The part of the strategy that is about checkpoints."""

    _spread: SpreadModel | None = None
    _sharded: ShardedCheckpoints | None = None
    _save_distributed_checkpoint: bool | str = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_spread": None, "_sharded": None}

    @property
    def _is_cut(self) -> bool:
        return self._spread is not None and self._spread.holds(self._module)

    @abstractmethod
    def _cut_for_training(self) -> None:
        """Looks at the first batch and gives the weights to the ranks, unless this comes later."""

    def _open_checkpoints(self) -> None:
        """Makes the groups that sharded checkpoints are written through; all ranks call it."""
        if self._sharded is None and self._save_distributed_checkpoint:
            given = {
                "in_background": self._save_distributed_checkpoint == "async",
                "by_all_copies": self._reduction.is_sharded,
            }
            group = make_group(self._own_ranks, **given)
            self._sharded = ShardedCheckpoints(self._own_ranks, group, **given)

    def _close_checkpoints(self) -> None:
        """Waits for what is written in the background."""
        if self._sharded is not None:
            self._sharded.wait()

    def _refuse_plugin(self) -> None:
        if self._sharded is not None:
            refuse_io(self.checkpoint_io)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        return seam.with_default_io(self, AtomicCheckpointIO)

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model under its own names, on the first rank; all ranks have to call this."""
        if not self._is_cut:
            state = self._whole(super().lightning_module_state_dict())
            return {} if self._leaves_to_first else state
        self._refuse_if_failed()
        assert self._spread is not None
        with self._between.suspended():
            if self._sharded is not None:
                return self._spread.written_state_dict()
            return self._spread.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state, numbered as on one device, on the first rank; all have to call this."""
        if self._spread is None or not self._spread.has_optimizers:
            state = self._whole(super().optimizer_state(optimizer))
            return {**state, "state": {}} if self._leaves_to_first else state
        self._refuse_if_failed()
        plain = seam.plain_optimizer(optimizer)
        if self._sharded is not None:
            return self._spread.written_optimizer_state(plain)
        with self._between.suspended():
            return self._spread.optimizer_state(plain)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._cut_for_training()  # first, so that the state of other ranks is never on the device
        if self._spread is None or not self._spread.has_optimizers:
            super().load_optimizer_state_dict(checkpoint)
            return
        seam.restore_loaders(self._module.trainer)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._spread.load_optimizer_state(optimizer, state)
            seam.optimizer_to_device(optimizer, self.root_device)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        with self._between.suspended():
            if self.is_global_zero:
                checkpoint = with_weights(checkpoint, self._module)
            if self._sharded is None:
                super().save_checkpoint(checkpoint, filepath, storage_options)
                return
            self._sharded.save(checkpoint, filepath, list(self._module.state_dict()))

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state before the model is cut or after it is whole again; its tensors may be shared."""
        if not any(map(is_parted, tensors(state))):
            return state
        whole = partial(whole_tensor, sharers=self._own_ranks.sharers)
        for name, value in state.items():  # the dict stays: versions of modules are with it
            state[name] = map_tensors(whole, value)
        return state

    @property
    def _leaves_to_first(self) -> bool:
        """Whether another rank writes what is whole on all."""
        return self._sharded is not None and not self._own_ranks.is_first

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        remove = partial(super().remove_checkpoint, filepath)
        if self._sharded is None:
            remove()
        else:
            self._sharded.remove(remove)

    def _refuse_if_failed(self) -> None:
        if self._failed:
            raise CheckpointError(
                "no checkpoint can be made after a failure: the other stages have ended"
            )
