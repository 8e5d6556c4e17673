"""A script that starts its ranks itself: whichever process is killed, none is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.faults.harness import LIMIT_S
from tests.helpers import PATIENCE

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from torch.utils.data import DataLoader
from tests import lit

class Slow(lit.Lit):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            sys.stderr.write(f"rank {self.global_rank} is process {os.getpid()}\\n")
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    trainer = lit.trainer({"num_microbatches": 2}, 2, max_epochs=1000)
    trainer.fit(lit.seeded(Slow), DataLoader(lit.rows(), batch_size=8))
"""


def _marked(mark):
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or gone by now
            if process.environ().get("MARK") == mark:
                found.append(process.pid)
    return found


@pytest.mark.parametrize(("rank", "number"), [(0, "KILL"), (1, "KILL"), (0, "INT")])
def test_whichever_process_is_killed_none_is_left(tmp_path, rank, number):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    environment |= {"OMP_NUM_THREADS": "1", "MARK": str(tmp_path)}
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,  # Ctrl-C is for this job alone
        )
    try:
        end_s = time.monotonic() + 200
        while len(found := dict(_pids(tmp_path))) < 2:
            assert process.poll() is None, (tmp_path / "err").read_text()
            assert time.monotonic() < end_s, (tmp_path / "err").read_text()
            time.sleep(0.1)
        if number == "INT":  # as a terminal does: to all processes of the job
            os.killpg(process.pid, signal.SIGINT)
        else:
            time.sleep(2)
            os.kill(found[rank], signal.SIGKILL)
        killed_s = time.monotonic()
        process.wait(LIMIT_S * PATIENCE)
        while _marked(str(tmp_path)):
            assert time.monotonic() - killed_s < LIMIT_S * PATIENCE, "a process is left"
            time.sleep(0.2)
    finally:
        for pid in _marked(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    text = (tmp_path / "err").read_text()
    assert process.returncode not in (0, None)
    if number == "KILL":
        assert f"global rank {rank} has died" in text
    else:
        assert process.returncode == 1
        assert "Traceback" not in text, text


def _pids(folder):
    for rank, pid in re.findall(r"rank (\d) is process (\d+)", (folder / "err").read_text()):
        yield int(rank), int(pid)
