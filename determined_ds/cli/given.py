"""``python -m determined_ds.cli.given WORD``: ``det-ds`` with arguments that no shell on their way can change."""

import base64
import json
import sys

from determined_ds.cli.main import main

main(json.loads(base64.urlsafe_b64decode(sys.argv[1])))
