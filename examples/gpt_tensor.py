"""The GPT of examples/gpt.py, of whose blocks two processes each compute a half of the MLP.

How tensors are shared is said with torch's own words; where they are, the strategy's
`tensor_parallel_size` says. On one device nothing of this happens. Run it with

    lightning-pipe fit --config configs/gpt.yaml --config configs/gpt_tensor.yaml
"""

from examples.gpt import GPT
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class SharedGPT(GPT):
    """A GPT with tensor-parallel MLPs."""

    def configure_model(self) -> None:
        first = self.blocks[0].mlp[0].weight
        if self.device_mesh is None or isinstance(first, DTensor):  # one device, or a second run
            return
        mesh = self.device_mesh["tensor_parallel"]
        if mesh.size() == 1:
            return
        plan = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        for block in self.blocks:
            parallelize_module(block, mesh, plan)
