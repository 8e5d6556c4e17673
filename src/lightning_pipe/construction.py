"""Where a module gets its weights: `configure_model`, the meta device, checkpoints.

What is built in `configure_model` is never whole on a rank of several: see `split/blueprint.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from typing_extensions import override

from lightning_pipe import _lightning as seam
from lightning_pipe.data import share_random_state
from lightning_pipe.manners import AtomicCheckpointIO
from lightning_pipe.processes import PipelineProcesses
from lightning_pipe.runtime._dtensor import distributing_locally
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.sharded import is_sharded, read_sharded
from lightning_pipe.shared_tensors import laid_out_state
from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.blueprint import Blueprint


class PipelineConstruction(PipelineProcesses):
    """The part of the strategy that is about making weights."""

    _blueprint: Blueprint | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_blueprint": None}

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """What is made here is on the device, of the precision's type and, in a run of several
        ranks, made only where it is owned.

        Args:
            empty_init: Make no values: those of a checkpoint, or of `reset_parameters`, will do.
        """
        if self._pipeline_layout.num_ranks == 1:
            with super().tensor_init_context(empty_init):
                yield
            return
        empty = torch.device("meta") if empty_init else nullcontext()
        with super().tensor_init_context(), self._building(), distributing_locally(), empty:
            yield

    def _building(self) -> AbstractContextManager[None]:
        module = self.lightning_module
        if module is None or self._ranks is None or not seam.is_running(self):
            return nullcontext()
        return self._shared_blueprint(self._ranks).building(module)

    def _shared_blueprint(self, ranks: Ranks) -> Blueprint:
        """Begun by all ranks together, from the same random state."""
        if self._blueprint is None:
            share_random_state(ranks, self.root_device)
            self._blueprint = Blueprint(self.root_device)
        return self._blueprint

    def _build_absent(self, module: LightningModule) -> None:
        """Initialises what the user has made on the meta device."""
        tensors = [*module.parameters(), *module.buffers()]
        if not any(tensor.is_meta for tensor in tensors if not is_fake(tensor)):
            return
        if self._pipeline_layout.num_ranks > 1:
            self._shared_blueprint(self._own_ranks).make_absent(module)
            return
        blueprint = Blueprint(self.root_device)
        blueprint.make_absent(module)
        blueprint.check()
        blueprint.finish()

    def _serving(self) -> AbstractContextManager[None]:
        return nullcontext() if self._blueprint is None else self._blueprint.serving()

    def _forget_blueprint(self) -> None:
        """At the end of a run: what was never cut is made whole."""
        if self._blueprint is not None:
            self._blueprint.finish()
            self._blueprint = None

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if is_sharded(checkpoint_path):
            return read_sharded(checkpoint_path, weights_only)
        if self._blueprint is not None and isinstance(self.checkpoint_io, AtomicCheckpointIO):
            return self.checkpoint_io.load_mapped(checkpoint_path, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        assert self.lightning_module is not None
        state = laid_out_state(self.lightning_module, checkpoint["state_dict"])
        with self._serving():
            super().load_model_state_dict({**checkpoint, "state_dict": state}, strict=strict)
