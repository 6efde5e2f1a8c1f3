"""`python -m dynattn JOB ...` is the same as `dynattn JOB ...`."""

import sys

from dynattn.scripts.cli import main

sys.exit(main())
