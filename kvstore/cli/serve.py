"""`kvstore serve`: run the sidecar in the foreground."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click

from kvstore.config import Setting, format_size, load_config, settings
from kvstore.logs import LogFormat, configure

_SHORT = {"arena_bytes": "--arena", "segment_bytes": "--segment", "hbm_slab_bytes": "--hbm-slab"}
"""Flags whose name is not that of their setting with dashes."""


def _with_a_flag_for_every_setting(command: Callable[..., None]) -> Callable[..., None]:
    for setting in reversed(list(settings())):
        command = _option(setting)(command)
    return command


def _option(setting: Setting) -> Callable[[Callable[..., None]], Callable[..., None]]:
    flag = _SHORT.get(setting.name, "--" + setting.name.replace("_", "-"))
    text = setting.description[0].upper() + setting.description[1:] + "."
    if shown := _shown_default(setting):
        text += f"  [default: {shown}]"
    if setting.base is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", setting.name, default=None, help=text)
    if setting.base is tuple:
        return click.option(
            flag, setting.name, multiple=True, metavar="DIR", help=f"{text} May be given several times."
        )
    value: dict[str, Any] = {"type": setting.base}
    if setting.unit == "bytes":
        value = {"metavar": "SIZE"}
    elif setting.choices:
        value = {"metavar": "|".join(setting.choices)}
    return click.option(flag, setting.name, default=None, help=text, **value)


def _shown_default(setting: Setting) -> str:
    if setting.base is bool:
        return "yes" if setting.default else "no"
    if not setting.default:
        return ""  # what nothing or 0 means is in the description
    if isinstance(setting.default, int):
        return format_size(setting.default) if setting.unit == "bytes" else str(setting.default)
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False, path_type=Path), help="TOML file with settings.")
@_with_a_flag_for_every_setting
def serve(file: Path | None, **flags: object) -> None:
    """Run the sidecar until SIGTERM or Ctrl-C.

    A setting comes from its flag, else from KVSTORE_<FIELD> in the environment, else from the TOML file. Sizes are written
    as 512MiB or 4GiB. Prints one line when it is ready; its log goes to standard error.
    """
    import uvloop

    from kvstore.sidecar import Sidecar

    config = load_config(file=file, environ=os.environ, flags=_given(flags))
    configure(config.log_level, cast("LogFormat", config.log_format))
    uvloop.run(Sidecar(config, on_ready=click.echo).run())


def _given(flags: dict[str, object]) -> dict[str, object]:
    """Without those that were not given: None, or no value of a list."""
    return {name: value for name, value in flags.items() if value not in {None, ()}}
