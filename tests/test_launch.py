"""Real launches over two nodes, both on this machine: torchrun, and what SLURM's srun starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tests import lit
from tests.helpers import PATIENCE
from tests.lit import run_ranks
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys, torch
from tests import lit
from tests.test_launch import train

folder, devices, copies = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if __name__ == "__main__":
    strategy = {"pipeline_parallel_size": 2, "data_parallel_size": copies}
    module, trainer = train(strategy, devices=devices, num_nodes=2)
    ranks = trainer.strategy._own_ranks
    assert trainer.node_rank == trainer.global_rank // devices
    found = {"node": trainer.node_rank, "position": ranks.position, **lit.outcome(module, trainer)}
    torch.save(found, f"{folder}/{trainer.global_rank}.pt")
"""


def train(strategy: Any, devices: int, **more: Any) -> Any:
    """Trains on rows of which each copy has its own, in their order."""
    module = lit.seeded(lit.Lit)
    used = lit.trainer(strategy, devices, **more)
    module.training_step = lambda batch, batch_idx: module.loss(batch)
    copies = used.strategy.distributed_sampler_kwargs["num_replicas"] if strategy else 1
    loader = DataLoader(lit.rows(), batch_size=8 // copies)
    used.fit(module, loader)
    return module, used


def _whole() -> Any:
    return lit.outcome(*train(None, 1))


def _environment(**more: Any) -> dict[str, str]:
    found = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    found |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    return found | {name: str(value) for name, value in more.items()}


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(commands: list[list[str]], environments: list[dict[str, str]], folder: Path) -> list[Any]:
    """Runs a job's processes; the outcome of each rank."""
    logs = [folder / f"log {number}" for number in range(len(commands))]
    processes = []
    for command, env, log in zip(commands, environments, logs, strict=True):
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
    try:
        ended = [process.wait(60 * PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(ended), "\n".join(log.read_text()[-2000:] for log in logs)
    files = sorted(folder.glob("*.pt"), key=lambda file: int(file.stem))
    return [torch.load(file) for file in files]


def _job(folder: Path, devices: int, copies: int) -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return [str(script), str(folder), str(devices), str(copies)]


def test_torchrun_on_two_nodes_trains_one_pipeline(tmp_path: Path) -> None:
    job = _job(tmp_path, devices=1, copies=1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={_port()}"]
    commands = [[*torchrun, f"--node-rank={node}", *job] for node in range(2)]
    found = _run(commands, [_environment()] * 2, tmp_path)
    assert [one["node"] for one in found] == [0, 1]
    assert [one["position"] for one in found] == [1, 0]  # the last stage is on the first node
    lit.assert_equal(found, run_ranks(1, _whole)[0])


def test_slurm_on_two_nodes_trains_a_copy_on_each(tmp_path: Path) -> None:
    job = _job(tmp_path, devices=2, copies=2)
    of_job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "localhost",
        "SLURM_NNODES": 2,
        "SLURM_NTASKS": 4,
        "SLURM_NTASKS_PER_NODE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _port(),
    }
    environments = [
        _environment(**of_job, SLURM_PROCID=rank, SLURM_LOCALID=rank % 2, SLURM_NODEID=rank // 2)
        for rank in range(4)
    ]
    found = _run([[sys.executable, *job]] * 4, environments, tmp_path)
    assert [(one["node"], one["position"]) for one in found] == [(0, 1), (0, 0), (1, 1), (1, 0)]
    for one in found[1:]:
        assert all(torch.equal(v, found[0]["weights"][n]) for n, v in one["weights"].items())
