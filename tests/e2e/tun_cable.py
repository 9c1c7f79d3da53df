"""A cable between two TUN devices whose delay and loss are ours, for kernels without netem: python tun_cable.py NAME NAME SEED

-> delay 0.05        one way, seconds        <- ready, and ok after each line
-> loss 0.2          of the packets, either way
"""

import collections
import fcntl
import os
import random
import select
import struct
import sys
import time

MAX_QUEUED = 1000  # packets each way, as netem's limit
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET = 1 << 16


class Cable:
    def __init__(self, names: list[str], seed: int) -> None:
        self.ends = [open_tun(name) for name in names]
        self.delay_s = self.loss = 0.0
        self._random = random.Random(seed)
        self._queues = [collections.deque[tuple[float, bytes]]() for _ in self.ends]  # by the end they came in at

    def run(self) -> None:
        """Until standard input ends."""
        say("ready")
        while True:
            readable, _, _ = select.select([0, *self.ends], [], [], self._wait_s())
            for number, end in enumerate(self.ends):
                if end in readable:
                    self._take(number)
                self._deliver(number)
            if 0 in readable:
                line = os.read(0, 100).decode()
                if not line:
                    return
                name, _, value = line.partition(" ")
                setattr(self, {"delay": "delay_s", "loss": "loss"}[name], float(value))
                say("ok")

    def _take(self, number: int) -> None:
        try:
            packet = os.read(self.ends[number], _PACKET)
        except (BlockingIOError, OSError):
            return  # the device is down
        if self._random.random() >= self.loss and len(self._queues[number]) < MAX_QUEUED:
            self._queues[number].append((time.monotonic() + self.delay_s, packet))

    def _deliver(self, number: int) -> None:
        queue, out = self._queues[number], self.ends[1 - number]
        while queue and queue[0][0] <= time.monotonic():
            _, packet = queue.popleft()
            try:
                os.write(out, packet)
            except OSError:
                continue  # the device is down: the packet is lost

    def _wait_s(self) -> float | None:
        due_s = [queue[0][0] for queue in self._queues if queue]
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None


def open_tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    Cable(sys.argv[1:3], int(sys.argv[3])).run()
