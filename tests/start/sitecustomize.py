"""What every Python that a test starts runs first: fewer collections of garbage.

Nothing that torch or TensorFlow make while they are imported is garbage, yet the collector looks at
all of it again and again, and once more when the process ends. Without that, a process that imports
torch and makes an optimizer takes 2.6 s of a core instead of 3.9. (conftest.py puts this folder on
PYTHONPATH.)
"""

import atexit
import gc

gc.set_threshold(10_000, 10, 10)
# Registered first, so it runs last: the end of the process passes over what is still there.
atexit.register(gc.freeze)
