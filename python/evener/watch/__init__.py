"""What a rank does now, where another process can read it: also when the rank is stopped or gone.

ring    one small file in shared memory a rank: its writer, and a reader for any process
inside  what runs in a watched rank: marks, and a thread that answers questions

Nothing here is imported where EVENER_LAUNCH_WATCH is not set; `evener launch` sets it.
"""

__all__ = ["inside", "ring"]
