"""The planner: for every bucket the algorithm and the mildest compression that hides.

    probe     measures this network and these compressors, on the groups that training uses
    costs     what it found, or what a network that is only described would give: bytes to time
    simulate  a step in virtual time: buckets through the lanes, forward and backward beside them
    choose    plays with forms until nothing is exposed, then takes back what was not needed
    live      does all this in a running job: rank 0 decides, everybody follows, and again when the
              network has changed
    forecast  the same for a cluster that is not there yet (`evener plan`)

The first four are plain arithmetic, without torch but for `probe`.
"""

__all__ = ["choose", "costs", "forecast", "live", "moments"]
