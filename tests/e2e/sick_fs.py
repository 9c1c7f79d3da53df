"""Small file systems of our own that can be filled, turned read-only, or lose sectors while somebody uses them. Need root."""

import contextlib
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_COMMAND_DEADLINE_S = 20.0
_FIBMAP = 1  # linux/fs.h: the block of the device where a block of a file lies
_FIGETBSZ = 2
_STEP_BYTES = 64 << 10


def needs_mounts() -> None:
    """Skips the test, with the reason, where file systems cannot be mounted."""
    if why_not := _why_no_mounts():
        pytest.skip(why_not)


def needs_loop_devices() -> None:
    """Likewise for file systems in a file."""
    needs_mounts()
    if why_not := _why_no_loop_devices():
        pytest.skip(why_not)


@contextlib.contextmanager
def mounted(kind: str, source: str, options: str) -> Iterator[Path]:
    """A file system for a while; everything on it must be closed by then."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
        stack.callback(folder.rmdir)
        _run("mount", "-t", kind, "-o", options, source, str(folder))
        stack.callback(_unmount, folder)
        yield folder


def _unmount(folder: Path) -> None:
    try:
        _run("umount", str(folder))
    except subprocess.CalledProcessError:
        _run("umount", "--lazy", str(folder))  # gone when the last user is
        raise


def remount(folder: Path, options: str) -> None:
    _run("mount", "-o", f"remount,{options}", str(folder))


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """For a while every write hangs, as it does on a device that does not answer; reads of files go on."""
    _run("fsfreeze", "--freeze", str(folder))
    try:
        yield
    finally:
        _run("fsfreeze", "--unfreeze", str(folder))


@contextlib.contextmanager
def tmpfs(nbytes: int) -> Iterator[Path]:
    """It has what a tmpfs has: no device below it, so it can be full and nothing worse."""
    with mounted("tmpfs", "none", f"size={nbytes}") as folder:
        yield folder


def fill(folder: Path) -> Path:
    """Take all the room there is, as somebody else's file does; which one."""
    other = folder / "somebody-else"
    with other.open("wb", buffering=0) as file:
        for step in (_STEP_BYTES, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * step)
    return other


class LoopDevice:
    """A block device that is a file."""

    def __init__(self, image: Path, nbytes: int) -> None:
        self._image = image
        with image.open("wb") as file:
            file.truncate(nbytes)
        self.name = _run("losetup", "--find", "--show", str(image))

    @contextlib.contextmanager
    def without_sectors(self, start: int) -> Iterator[None]:
        """For a while every read and write from byte `start` on is an I/O error. Keep the file system's own blocks out of it:
        the kernel waits for those without end when the device has become too short for them."""
        with self._image.open("r+b") as file:
            file.seek(start)
            lost = file.read()
            file.truncate(start)
            _run("losetup", "--set-capacity", self.name)
            try:
                yield
            finally:
                file.seek(start)
                file.write(lost)
                file.flush()
                _run("losetup", "--set-capacity", self.name)

    def fail_file_system(self) -> None:
        """What ext4 does when it meets an inconsistency: with errors=remount-ro it takes no writes any more."""
        (Path("/sys/fs/ext4") / Path(self.name).name / "trigger_fs_error").write_text("1")

    def close(self) -> None:
        _run("losetup", "--detach", self.name)


@contextlib.contextmanager
def ext4_on_loop(image: Path, nbytes: int) -> Iterator[tuple[Path, LoopDevice]]:
    """Without a journal, and with all its own blocks in front: what lies further behind belongs to files."""
    device = LoopDevice(image, nbytes)
    try:
        _run("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-O", "^has_journal", device.name)
        with mounted("ext4", device.name, "errors=remount-ro") as folder:
            yield folder, device
    finally:
        device.close()


def place_on_device(file: Path, offset: int) -> int:
    """Where byte `offset` of a file lies on the device below."""
    fd = os.open(file, os.O_RDONLY)
    try:
        block_nbytes = struct.unpack("i", fcntl.ioctl(fd, _FIGETBSZ, struct.pack("i", 0)))[0]
        block = struct.unpack("i", fcntl.ioctl(fd, _FIBMAP, struct.pack("i", offset // block_nbytes)))[0]
    finally:
        os.close(fd)
    assert block > 0, "not on the device"
    return int(block * block_nbytes + offset % block_nbytes)


@functools.cache
def _why_no_mounts() -> str:
    if os.geteuid() != 0:
        return "mounting a file system needs root"
    try:
        with tmpfs(1 << 20):
            return ""
    except subprocess.CalledProcessError as err:
        return f"no file system can be mounted here: {err.stderr.strip()}"


@functools.cache
def _why_no_loop_devices() -> str:
    missing = [tool for tool in ("losetup", "mkfs.ext4", "fsfreeze") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} missing"
    try:
        with tempfile.TemporaryDirectory() as folder, ext4_on_loop(Path(folder) / "image", 4 << 20):
            return ""
    except subprocess.CalledProcessError as err:
        return f"no ext4 on a loop device here: {err.stderr.strip()}"


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMMAND_DEADLINE_S)
    return done.stdout.strip()
