"""`evener quickstart`: writes a small project that runs as it is, to put your own model into.

Each folder of `projects` is one: a script, a README that says what to type, and where the launcher
starts it, its options in `evener.toml`. They are copied, not made: what tests run is what you get.
"""

from pathlib import Path

PROJECTS = Path(__file__).parent / "projects"

__all__ = ["PROJECTS"]
