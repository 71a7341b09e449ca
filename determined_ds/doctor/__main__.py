"""``python3 -m determined_ds.doctor``: the same where ``det-ds`` is not installed, as in a task."""

import sys

from determined_ds.doctor.doctor import doctor
from determined_ds.errors import ConfigError

try:
    doctor(prog_name="python3 -m determined_ds.doctor")
except ConfigError as error:
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(error.exit_code)
