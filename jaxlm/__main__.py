"""`python -m jaxlm`: the command, also where no folder of scripts is on the path."""

import sys

from jaxlm.cli import main

sys.exit(main())
