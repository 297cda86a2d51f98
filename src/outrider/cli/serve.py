"""``outrider serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import socket

from outrider.cli.options import add_model, open_llm
from outrider.cli.parser import add_fields, given
from outrider.cli.speculation import add_speculation, speculation
from outrider.core.errors import UsageError
from outrider.serve.config import ServerConfig

_EXTRA = ("fastapi", "uvicorn", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, positional=True)
    add_fields(parser.add_argument_group("server"), ServerConfig, "server")
    add_speculation(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; returns the exit code."""
    settings = ServerConfig(**given(args, "server"))
    config = speculation(args)
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the server needs {', '.join(missing)}: pip install 'outrider[serve]'")
    from outrider.serve.auth import load_keys

    # What is wrong with the keys or the port is said before the model is loaded.
    load_keys(settings)
    _check_port(settings)
    llm = open_llm(args, config)
    from outrider.serve.server import serve

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    return serve(llm, settings)


def _check_port(settings: ServerConfig) -> None:
    """Raise UsageError if nobody could listen there now."""
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if os.name == "posix":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {settings.host}, port {settings.port} ({error.strerror}); choose another --port"
        ) from None
