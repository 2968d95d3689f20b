"""Twins: random programs, run by Evener and by the plain reference, and compared.

Each pillar has a module here with a `TWIN`: a hypothesis strategy that makes programs, a function
that runs one program both ways and raises where they differ, and faults that can be put in to see
that the twin finds them. `python -m tests.twins --help` runs them; see README.md.
"""
