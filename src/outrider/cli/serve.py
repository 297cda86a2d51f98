"""``outrider serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import importlib.util
import logging

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

    load_keys(settings)  # what is wrong with the keys is said before the model is loaded
    llm = open_llm(args, config)
    from outrider.serve.server import serve

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    return serve(llm, settings)
