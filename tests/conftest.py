"""What the calling shell may have set and what would change the meaning of tests."""

import os
import signal

# A suite that is started in the background inherits an ignored SIGINT, and so would every process
# that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Unbuffered, print() writes a line in pieces, and mpirun mixes the pieces of its ranks.
os.environ.pop("PYTHONUNBUFFERED", None)
