"""``outrider models``: the models that have a short name, and fetching them."""

from __future__ import annotations

import argparse
import json
import sys

from outrider.bench.table import format_table
from outrider.core.errors import ConfigError, UnknownNameError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    actions = parser.add_subparsers(prog=parser.prog, dest="action", metavar="ACTION", title="actions")
    fetch = actions.add_parser("fetch", help="download a model into the cache, and print where it lies")
    fetch.add_argument("name", metavar="NAME", help="one of the names that 'outrider models' lists")
    fetch.set_defaults(parser=fetch)


def run(args: argparse.Namespace) -> int:
    """List the aliases, or fetch one; returns the exit code."""
    if args.action != "fetch":
        return _list(args.json)
    if args.json:
        raise ConfigError("--json is for the list; 'fetch' prints the path and nothing else")
    return _fetch(args.name)


def _list(as_json: bool) -> int:
    from outrider.heads.shipped import shipped_methods
    from outrider.models.cache import cache_dir
    from outrider.models.fetch import list_aliases

    found = list_aliases()
    if as_json:
        records = [
            {
                "name": status.alias.name,
                "description": status.alias.description,
                "licence": status.alias.licence,
                "bytes": status.alias.size,
                "download_bytes": status.alias.download,
                "sha256": status.alias.sha256,
                "drafters": list(shipped_methods(status.alias.name)),
                "fetched": status.fetched,
                "path": str(status.path) if status.fetched else None,
            }
            for status in found
        ]
        print(json.dumps(records, indent=1))
        return 0
    rows = []
    for status in found:
        alias = status.alias
        where = str(status.path) if status.fetched else "no"
        drafters = ", ".join(shipped_methods(alias.name)) or "-"
        rows.append([alias.name, f"{alias.size / 1e6:,.0f} MB", alias.licence, alias.description, drafters, where])
    print(format_table(["name", "size", "licence", "what it is", "drafters", "fetched"], rows, align="lrllll"))
    print("\nDrafters are those that were trained for the model and come with this package; 'auto' uses the first.")
    print(f"Models lie in {cache_dir()}. A local file or folder, or a hub id, can be used in place of a name.")
    return 0


def _fetch(name: str) -> int:
    from outrider.models.aliases import ALIASES
    from outrider.models.fetch import fetch

    if name not in ALIASES:
        raise UnknownNameError("model alias", name, ALIASES)
    print(fetch(ALIASES[name], progress=sys.stderr.isatty()))
    return 0
