"""``det-ds``, one file a command."""

import gc

# Most commands are over in a fraction of a second: collecting while modules load takes a tenth of that.
gc.set_threshold(50_000)
