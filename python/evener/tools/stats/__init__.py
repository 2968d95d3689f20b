"""`evener stats`: what a running job's network, collectives and memory do, from its records.

show.py makes tables of the records of all pillars, metrics.py Prometheus' text, command.py prints
them, once or again and again.
"""
