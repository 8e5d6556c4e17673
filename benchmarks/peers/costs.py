"""What units of the model cost here, as `lightning-pipe plan --measure cpu --save-costs` finds it.

python -m benchmarks.peers.costs SIZE FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from benchmarks.peers.gpt import SIZES, LitGPT, batch_of, loss_of

from lightning_pipe.runtime.measured import measured_costs

_STAGES = 4  # two ranks with two chunks


def main() -> None:
    """Times each unit, alone on the machine."""
    name, file = sys.argv[1:]
    torch.set_num_threads(1)
    size = SIZES[name]
    rows = size.batch // size.microbatches
    module = LitGPT(size)
    table = measured_costs(
        module,
        lambda batch: loss_of(module.net(batch[0]), batch[1]),
        [part[:rows] for part in batch_of(size, 0)],
        num_stages=_STAGES,
        device=torch.device("cpu"),
        rows=rows,
    )
    Path(file).write_text(table.to_json())


if __name__ == "__main__":
    main()
