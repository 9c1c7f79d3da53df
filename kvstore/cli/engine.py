"""`kvstore engine`: the included engine as a server."""

import asyncio
import functools
import importlib.util
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.finite import SECONDS
from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.core.keys import KVSpec
    from kvstore.core.traces import Tracer
    from kvstore.engine_connector.engine.api_server.server import ApiServer
    from kvstore.engine_connector.engine.llm import LLM
    from kvstore.engine_connector.protocol import Connector, HandOver

_STORED_FORMATS = {"same": "same", "fp8": "fp8_e4m3", "int8": "int8"}
_COUNT = click.IntRange(min=1)
_FLUSH_S = 2.0  # for spans that are still to be sent
_NEEDED = ("aiohttp", "gguf", "jinja2", "safetensors", "tokenizers", "torch")


@click.group()
def engine() -> None:
    """Run the included engine."""


@engine.command()
@click.argument("model", required=False)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; there is no access control."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option("--served-model-name", metavar="NAME", help="[default: the model's file or folder]")
@click.option("--socket", metavar="PATH", help="The sidecar's.  [default: where `kvstore serve` listens]")
@click.option("--tenant", default="", help="Whose blocks these are.")
@click.option(
    "--fetch",
    type=click.Choice(["planned", "always", "never"]),
    default="planned",
    show_default=True,
    help="What the sidecar has: as far as it comes sooner than it is computed, all of it, or nothing.",
)
@click.option("--no-store", is_flag=True, help="Run without a sidecar.")
@click.option(
    "--hand-over",
    type=click.Choice(["producer", "consumer", "both"]),
    help="Prefill for others to decode, decode what others prefilled, or both, as each request's kv_transfer_params say.",
)
@click.option("--device", default="cpu", show_default=True, help="Of weights and pages: cpu or cuda.")
@click.option("--layerwise", is_flag=True, help="Attend to loads while they arrive, and save while computing.")
@click.option("--num-pages", type=_COUNT, default=1024, show_default=True, help="Of the engine's own KV cache.")
@click.option("--block-tokens", type=_COUNT, default=16, show_default=True, help="Tokens of a page.")
@click.option("--max-batch", type=_COUNT, default=16, show_default=True, help="Samples computed side by side.")
@click.option("--max-waiting", type=_COUNT, default=64, show_default=True, help="Requests that may queue; then 429.")
@click.option("--chunk-tokens", type=_COUNT, default=512, show_default=True, help="Of a prompt, in one step.")
@click.option("--max-model-len", type=_COUNT, help="Longest prompt and answer.  [default: the model's context]")
@click.option("--num-threads", type=_COUNT, help="That compute.  [default: torch's]")
@click.option("--kv-dtype", default="float16", show_default=True, help="Of the pages: float16 or bfloat16.")
@click.option(
    "--kv-store-format",
    type=click.Choice(list(_STORED_FORMATS)),
    default="same",
    show_default=True,
    help="Of blocks in the store: as the pages, or lossy in half the bytes.",
)
@click.option("--hash-seed", default="", help="Engines with different seeds do not share blocks.")
@click.option("--prefix-caching/--no-prefix-caching", default=True, help="In the engine's own pages.  [default: yes]")
@click.option("--max-body-bytes", type=_COUNT, default=8 << 20, show_default=True, help="Larger requests: 413.")
@click.option("--max-connections", type=_COUNT, default=1024, show_default=True)
@click.option(
    "--max-unsent-bytes",
    type=click.IntRange(min=4096),
    default=256 << 10,
    show_default=True,
    help="Of a stream that its client does not read; beyond, it is aborted.",
)
@click.option("--request-deadline-s", type=SECONDS, default=600.0, show_default=True, help="For a whole answer.")
@click.option("--stop-deadline-s", type=SECONDS, default=15.0, show_default=True, help="After SIGTERM.")
@click.option("--trace", is_flag=True, help="Send spans of requests to the collector that OTEL_* variables name.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def serve(**options: Any) -> None:
    """Serve MODEL, a GGUF file or a directory of safetensors, in OpenAI's HTTP API, until SIGTERM or Ctrl-C.

    MODEL's default is $KVSTORE_MODEL, else the installed package's. Prints one line when it is ready; its log goes to
    standard error. A sidecar that is absent is no error: the engine computes everything itself until there is one.
    """
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed; use pip install 'kvstore-tiered[engine]'", field=package, value=""
            )
    import uvloop

    logging.basicConfig(
        level=options["log_level"].upper(), format="time=%(asctime)s level=%(levelname)s source=%(name)s %(message)s"
    )
    model = _model_path(options["model"])
    uvloop.run(_serve(options, model))


async def _serve(options: dict[str, Any], model: Path) -> None:
    from kvstore.engine_connector.engine.api_server.connections import ConnectionLimits
    from kvstore.engine_connector.engine.api_server.server import ApiServer, ServerConfig

    limits = ConnectionLimits(max_connections=options["max_connections"], max_unsent_bytes=options["max_unsent_bytes"])
    config = ServerConfig(
        model_name=options["served_model_name"] or model.name.removesuffix(".gguf"),
        connections=limits,
        hand_over=_hand_over(options),
        tenant=options["tenant"],
        **{name: options[name] for name in ("host", "port", "max_body_bytes", "request_deadline_s", "stop_deadline_s")},
    )
    tracer = None
    if options["trace"]:
        from kvstore.tracing import open_tracer

        tracer = open_tracer("kvstore-engine")
    server = ApiServer(config, functools.partial(_open_llm, options, model, tracer), tracer)
    _stop_on_signals(server)
    try:
        await server.run(lambda port: _say_ready(config.host, port, config.model_name))
    finally:
        if tracer is not None:
            await asyncio.to_thread(tracer.close, _FLUSH_S)


def _open_llm(options: dict[str, Any], model: Path, tracer: "Tracer | None") -> "LLM":
    from kvstore.engine_connector.engine.llm import LLM

    names = (
        "num_pages",
        "block_tokens",
        "max_batch",
        "max_waiting",
        "chunk_tokens",
        "max_model_len",
        "num_threads",
        "kv_dtype",
        "hash_seed",
        "prefix_caching",
        "device",
        "layerwise",
    )
    return LLM(
        model,
        connector_factory=_connector_factory(options, tracer),
        stored_format=_STORED_FORMATS[options["kv_store_format"]],
        tracer=tracer,
        **{name: options[name] for name in names},
    )


def _connector_factory(options: dict[str, Any], tracer: "Tracer | None") -> "Callable[[KVSpec], Connector] | None":
    if options["no_store"]:
        if options["socket"] is not None:
            raise ConfigError(
                f"socket: {options['socket']} and no store; leave out --socket or --no-store",
                field="socket",
                value=options["socket"],
            )
        return None
    from kvstore.engine_connector.local import open_connector

    return functools.partial(
        open_connector,
        socket_path=options["socket"],
        tenant=options["tenant"],
        hand_over=_hand_over(options),
        fetch=options["fetch"],
        tracer=tracer,
    )


def _hand_over(options: dict[str, Any]) -> "HandOver | None":
    """It goes through the store."""
    from kvstore.engine_connector.protocol import HandOver

    role = options["hand_over"]
    if role is not None and options["no_store"]:
        raise ConfigError(
            f"hand-over: {role} and no store; leave out --hand-over or --no-store", field="hand-over", value=role
        )
    return None if role is None else HandOver(role)


def _model_path(given: str | None) -> Path:
    """What the loader takes: a file or a folder; it says itself what is wrong with those."""
    from kvstore.models import find_model

    return find_model() if given is None else Path(given)


def _stop_on_signals(server: "ApiServer") -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, server.stop)


def _say_ready(host: str, port: int, model_name: str) -> None:
    where = f"[{host}]" if ":" in host else host
    click.echo(f"kvstore engine ready url=http://{where}:{port}/v1 model={model_name}")
