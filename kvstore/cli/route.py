"""`kvstore route`: one address in front of several engines."""

import asyncio
import importlib.util
import logging
import signal
from typing import Any

import click

from kvstore.cli.finite import SECONDS
from kvstore.core.errors import ConfigError

_COUNT = click.IntRange(min=1)
_NEEDED = ("aiohttp", "uvloop")


@click.command()
@click.option("--engine", "engines", multiple=True, metavar="URL", help="http://HOST:PORT. Given for each engine.")
@click.option(
    "--policy",
    type=click.Choice(["prefix", "least_loaded", "round_robin"]),
    default="prefix",
    show_default=True,
    help="Who gets a request: whoever has its prefix cached and is free, the least busy, or each in turn.",
)
@click.option(
    "--listen",
    default="127.0.0.1:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="There is no access control. Port 0: any.",
)
@click.option(
    "--max-lead",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Requests that an engine may have in flight more than the least busy one and still get more.",
)
@click.option(
    "--prefix-bytes",
    metavar="SIZE",
    default="16MiB",
    show_default=True,
    help="Text that an engine is taken to have cached; some 4 bytes a token. Up to 1.4 times as much memory here.",
)
@click.option(
    "--prefix-expiry-s", type=SECONDS, default=600.0, show_default=True, help="Unused text is forgotten after."
)
@click.option(
    "--health-path",
    default="/v1/models",
    show_default=True,
    metavar="PATH",
    help="Answers below 500 while an engine is up; vLLM has /health, the included engine /healthz.",
)
@click.option("--health-interval-s", type=SECONDS, default=1.0, show_default=True)
@click.option("--health-deadline-s", type=SECONDS, default=2.0, show_default=True)
@click.option("--connect-deadline-s", type=SECONDS, default=2.0, show_default=True)
@click.option(
    "--silence-s",
    type=SECONDS,
    default=300.0,
    show_default=True,
    help="An engine that sends nothing for so long failed.",
)
@click.option("--max-body-bytes", type=_COUNT, default=8 << 20, show_default=True, help="Larger requests: 413.")
@click.option("--max-connections", type=_COUNT, default=1024, show_default=True)
@click.option("--stop-deadline-s", type=SECONDS, default=15.0, show_default=True, help="After SIGTERM.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def route(**options: Any) -> None:
    """Spread the requests of OpenAI's HTTP API over several engines that serve the same model, until SIGTERM or Ctrl-C.

    Prints one line when it is ready; its log goes to standard error. /metrics, /healthz and /readyz are its own.
    """
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed; use pip install 'kvstore-tiered[route]'", field=package, value=""
            )
    import uvloop

    logging.basicConfig(
        level=options["log_level"].upper(), format="time=%(asctime)s level=%(levelname)s source=%(name)s %(message)s"
    )
    uvloop.run(_route(options))


async def _route(options: dict[str, Any]) -> None:
    from kvstore.engine_connector.engine.api_server.connections import ConnectionLimits
    from kvstore.route.server import Router, RouterConfig

    host, port = _address(options.pop("listen"))
    config = RouterConfig(
        host=host,
        port=port,
        prefix_bytes=_size(options.pop("prefix_bytes")),
        connections=ConnectionLimits(max_connections=options.pop("max_connections")),
        **{name: value for name, value in options.items() if name != "log_level"},
    )
    router = Router(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, router.stop)
    where = f"[{host}]" if ":" in host else host
    await router.run(lambda bound: click.echo(f"kvstore route ready url=http://{where}:{bound}/v1"))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ConfigError(
            f"listen: {text!r} is not right; use HOST:PORT, such as 127.0.0.1:8080", field="listen", value=text
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _size(text: str) -> int:
    from kvstore.config import parse_size

    try:
        size = parse_size(text)
    except ValueError:
        size = 0
    if not 0 < size <= 1 << 40:
        raise ConfigError(
            f"prefix-bytes: {text!r} is not right; use a size such as 64MiB, at most 1TiB",
            field="prefix-bytes",
            value=text,
        )
    return size
