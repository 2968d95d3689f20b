"""python -m evener.door: the folder that opens the door, for a PYTHONPATH of one's own."""

import sys

from evener.door.enter import SITE

sys.stdout.write(f"{SITE}\n")
