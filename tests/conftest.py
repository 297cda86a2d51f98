"""Settings for every test.

Threads of a parallel section that spin while they wait are fast on an idle machine and ruinous on a busy one, such as
two test workers on two cores: there they sleep instead. Set before PyTorch, which reads it once, is imported.
"""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts a command in the background has it ignore Ctrl-C; what these tests send must arrive all the same.
signal.signal(signal.SIGINT, signal.default_int_handler)
