"""The slab's memory on a GPU: what one process writes another reads. Copies from it into pages are in test_pages_on_device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvstore.tiers.hbm.memory import device_memory, map_device_memory

DEVICE = "cuda:0"
NBYTES = 64 << 20
ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 120.0

READER = """
import sys
from kvstore.tiers.hbm.memory import map_device_memory
slab = map_device_memory("cuda:0", int(sys.argv[1]), int(sys.argv[2]))
print(slab.slot(int(sys.argv[3]), 4096).cpu().numpy().tobytes().hex())
"""


def test_another_process_reads_what_was_written_through_a_descriptor():
    memory = device_memory(DEVICE, NBYTES)
    memory.open()
    try:
        block = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
        offset = memory.nbytes - 4096
        map_device_memory(DEVICE, os.dup(memory.fd), memory.nbytes).write(offset, block)
        command = [sys.executable, "-c", READER, str(memory.fd), str(memory.nbytes), str(offset)]
        seen = subprocess.run(
            command,
            pass_fds=[memory.fd],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        ).stdout.strip()
    finally:
        memory.close()

    assert seen == block.tobytes().hex()
