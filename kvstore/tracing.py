"""Turning traces on: nothing of OpenTelemetry is imported before (kvstore/otel.py)."""

import os
from typing import TYPE_CHECKING

from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.otel import OtelTracer

_PROTOCOL = "http/protobuf"


def open_tracer(service_name: str, **attributes: str) -> "OtelTracer":
    """`service_name`, unless the environment has one; `attributes` of the process. Takes some 0.2 s of imports. Raises
    ConfigError: the extra is not installed, or the environment asks for what we cannot do."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in {None, "", _PROTOCOL}:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not spoken here; use {_PROTOCOL}, to the collector's port 4318",
            field="OTEL_EXPORTER_OTLP_PROTOCOL",
            value=str(protocol),
        )
    try:
        from kvstore.otel import OtelTracer
    except ImportError as err:
        raise ConfigError(
            "trace: spans need the extra `trace`: pip install 'kvstore-tiered[trace]'",
            field="trace",
            value=str(err.name),
        ) from err
    try:
        return OtelTracer(service_name, attributes)
    except ValueError as err:  # of the SDK, which names the variable
        raise ConfigError(f"trace: {err}", field="trace", value=service_name) from err
