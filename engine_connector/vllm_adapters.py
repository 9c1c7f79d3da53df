"""LoRA adapters by content. Imports nothing of vLLM.

vLLM's block hashes hold an adapter's name and path, so that other weights under the same path would be served this one's KV
(vllm-project/vllm#42125), in this process or, with a store, in any other. What the files hold therefore joins the keys. Which
files vLLM has loaded we cannot see: it reads them at some time after its start. So only files that have not changed since before
the start are believed; the inode's change time says it, which no copying tool sets back.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.fingerprint import adapter_files, adapter_fingerprint

logger = logging.getLogger(__name__)


class LoraRequest(Protocol):
    """What is read of vllm.lora.request.LoRARequest."""

    lora_name: str
    lora_path: str


class Adapters:
    """One thread: vLLM's scheduler. `started_ns`: wall clock, before vLLM read any adapter."""

    def __init__(self, started_ns: int) -> None:
        self._started_ns = started_ns
        self._refused: set[tuple[str, str]] = set()

    def salt(self, lora: LoraRequest) -> bytes | None:
        """What tells this adapter's blocks from those of all others; None: unknown, so nothing of it is shared. Reads the files
        once, and looks at their times in each call."""
        try:
            return self._fingerprint(Path(lora.lora_path)).encode()
        except ConfigError as err:
            adapter = (lora.lora_name, lora.lora_path)
            if adapter not in self._refused:
                self._refused.add(adapter)
                logger.warning(
                    "adapter not shared name=%s path=%s reason=%s", lora.lora_name, lora.lora_path, err.message
                )
            return None

    def _fingerprint(self, directory: Path) -> str:
        files = adapter_files(directory)
        try:
            changed_ns = max(path.lstat().st_ctime_ns for path in _on_the_way([directory, *files]))
        except OSError as err:
            raise _refusal(f"cannot be read ({err.strerror})", directory) from err
        if changed_ns >= self._started_ns:
            raise _refusal("has changed since this engine started, so what is loaded is not known", directory)
        return adapter_fingerprint(directory)


def _on_the_way(paths: Iterable[Path]) -> Iterator[Path]:
    """These, and every symbolic link by which they are reached: one that was turned since leads to other files, old as they
    may be."""
    for path in paths:
        for part in (path.absolute(), *path.absolute().parents):
            if part.is_symlink():
                yield part
                yield from _on_the_way([part.parent / part.readlink()])
        yield path.resolve()


def _refusal(problem: str, directory: Path) -> ConfigError:
    return ConfigError(f"lora_path: {directory} {problem}", field="lora_path", value=str(directory))
