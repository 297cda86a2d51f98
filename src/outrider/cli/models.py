"""``outrider models``: the models that have a short name, and fetching them."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["list", "fetch"])


def run(args: argparse.Namespace) -> int:
    return 0
