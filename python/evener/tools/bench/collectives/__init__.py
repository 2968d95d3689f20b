"""`evener bench all_reduce` and the other nine: nccl-tests' options, table and JSON.

names     the commands' table, for the group `evener bench`
options   what may be asked for, and what is refused
shapes    counts, offsets and bandwidth formulas of each collective
values    what is put into buffers, what must come out, in every order of reduction
clock     one measurement: warm-up, iterations, aggregation, graphs, checks
gloo      ranks on the CPU         nccl, cuda    ranks on GPUs, by ctypes
algorithms  Evener's own all-reduce as further rows      sweep    many settings, the best and why
team      barriers and sums over the threads and processes of a run
output    the table and the JSON
"""
