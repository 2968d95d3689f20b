"""What the calling shell may have set and what would change the meaning of tests."""

import os
import signal
from contextlib import suppress

# A suite that is started in the background inherits an ignored SIGINT, and so would every process
# that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Unbuffered, print() writes a line in pieces, and mpirun mixes the pieces of its ranks.
os.environ.pop("PYTHONUNBUFFERED", None)

# An example that takes longer on a busy machine is no failure. Environments of other programs
# (`make wild`) have no hypothesis.
with suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("evener", deadline=None)
    settings.load_profile("evener")
