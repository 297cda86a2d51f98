"""``python -m tests.serve.process PORT PAUSE DRAIN``: the server over the fake target, as a process of its own."""

from __future__ import annotations

import sys

from outrider.serve.config import ServerConfig
from outrider.serve.server import serve
from tests.serve.support import Target, endless, open_llm


def main() -> int:
    port, pause, drain = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    llm = open_llm(endless, "none")
    assert isinstance(llm.executor, Target)
    llm.executor.pause = pause
    return serve(llm, ServerConfig(port=port, drain_timeout=drain))


if __name__ == "__main__":
    sys.exit(main())
