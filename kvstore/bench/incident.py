"""A command that is run in the middle of a run, such as one that kills the sidecar."""

import asyncio
import os
import shlex
from dataclasses import dataclass

from kvstore.core.clock import Clock
from kvstore.core.errors import ConfigError

COMMAND_DEADLINE_S = 60.0
"""The command is killed then, and the report says so."""

_TAIL = 500


@dataclass(frozen=True, slots=True)
class Incident:
    """`command`, split as a shell splits it but run without one, `at_s` seconds after the run began. It finds the server's
    label and address in KVSTORE_BENCH_LABEL and KVSTORE_BENCH_URL."""

    at_s: float
    command: str

    def __post_init__(self) -> None:
        try:
            empty = not shlex.split(self.command)
        except ValueError as err:
            raise ConfigError(f"run: {self.command!r}: {err}", field="run", value=self.command) from err
        if empty:
            raise ConfigError("run: empty; give a command, such as 'kill -9 1234'", field="run", value=self.command)


@dataclass(frozen=True, slots=True)
class IncidentOutcome:
    """`exit_code` is None when the command could not be started or was killed at its deadline; `output` says which."""

    at_s: float
    took_s: float
    exit_code: int | None
    output: str


async def carry_out(incident: Incident, clock: Clock, *, label: str, url: str) -> IncidentOutcome:
    """Wait for its time and run it."""
    origin_s = clock.now_s()
    await asyncio.sleep(incident.at_s)
    at_s = clock.now_s() - origin_s
    exit_code, output = await _run(incident.command, {"KVSTORE_BENCH_LABEL": label, "KVSTORE_BENCH_URL": url})
    return IncidentOutcome(at_s, clock.now_s() - origin_s - at_s, exit_code, output[-_TAIL:].strip())


async def _run(command: str, environment: dict[str, str]) -> tuple[int | None, str]:
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | environment,
        )
    except OSError as err:
        return None, f"cannot be started: {err}"
    try:
        async with asyncio.timeout(COMMAND_DEADLINE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return None, f"killed after {COMMAND_DEADLINE_S:g} s"
    finally:
        if process.returncode is None:  # cancelled
            process.kill()
    return process.returncode, output.decode(errors="replace")
