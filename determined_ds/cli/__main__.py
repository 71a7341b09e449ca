"""``python -m determined_ds.cli`` is ``det-ds``, where no script was installed."""

from determined_ds.cli.main import main

main()
