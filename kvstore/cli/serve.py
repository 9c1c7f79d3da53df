"""`kvstore serve`: run the sidecar in the foreground."""

import logging
import os
from pathlib import Path

import click


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False, path_type=Path), help="TOML file with settings.")
@click.option(
    "--socket", help="Path of the local socket.  [default: $XDG_RUNTIME_DIR/kvstore.sock or /tmp/kvstore-<uid>.sock]"
)
@click.option(
    "--arena",
    "arena_bytes",
    help="Memory to serve from, such as 4GiB.  [default: 1GiB, at most a quarter of what is free]",
)
@click.option(
    "--segment", "segment_bytes", help="Part of the arena given to one block size at a time.  [default: 64MiB]"
)
@click.option("--lease-ttl-s", type=float, help="Life of a lease whose request does not say.  [default: 30]")
@click.option("--grpc/--no-grpc", default=None, help="Serve gRPC on <socket>.grpc.  [default: yes]")
@click.option("--grpc-tcp", help="Serve gRPC on this host:port too.")
@click.option("--metrics-port", type=int, help="Port of /metrics and /healthz; 0: off.  [default: 0]")
@click.option("--log-level", help="debug, info, warning or error.  [default: info]")
def serve(file: Path | None, **flags: object) -> None:
    """Run the sidecar until SIGTERM or Ctrl-C.

    A setting comes from its flag, else from KVSTORE_<FIELD> in the environment, else from the TOML file; kvstore/config.py
    lists all of them, with units and ranges. Prints one line when it is ready; its log goes to standard error.
    """
    import uvloop

    from kvstore.config import load_config
    from kvstore.sidecar import Sidecar

    config = load_config(file=file, environ=os.environ, flags=flags)
    logging.basicConfig(
        level=config.log_level.upper(), format="time=%(asctime)s level=%(levelname)s source=%(name)s %(message)s"
    )
    uvloop.run(Sidecar(config, on_ready=click.echo).run())
