"""Runs a command that must not outlive its starter: `python -m kvstore.demo.guard RUN_DIR COMMAND...`

The starter holds the other end of our standard input. When it lets go, by close() or by being killed, the command is
ended and RUN_DIR removed. On KILL_SIGNAL the command gets kill -9, and RUN_DIR stays. The standard library alone is
imported: this process idles beside the demo.
"""

import os
import select
import shutil
import signal
import subprocess
import sys

KILL_SIGNAL = signal.SIGUSR1
"""From the starter, which does not know the command's process id; we are its parent, so that we hit no other's."""

STOP_DEADLINE_S = 5.0
"""For the command to end after SIGTERM; then it is killed."""


def main(arguments: list[str]) -> int:
    """Exit status: the command's own, when it ended by itself or on request."""
    run_dir, *command = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the starter's to handle
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr) as child:  # noqa: S603 (our starter's)
        signal.signal(KILL_SIGNAL, lambda *_: child.kill())
        ended = os.pidfd_open(child.pid)
        starter_gone = _wait(ended)
        if starter_gone:
            _end(child)
    if starter_gone:
        shutil.rmtree(run_dir, ignore_errors=True)  # the starter removes it itself when it is still there
    return child.returncode


def _wait(ended: int) -> bool:
    """Whether the starter went first. The one wait without a deadline: it is the process's purpose."""
    ready, _, _ = select.select([sys.stdin.fileno(), ended], [], [])
    return ended not in ready


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    try:
        child.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
