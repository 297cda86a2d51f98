"""``python -m outrider``: the command line, where the ``outrider`` script is not on the path."""

import sys

from outrider.cli.main import main

sys.exit(main())
