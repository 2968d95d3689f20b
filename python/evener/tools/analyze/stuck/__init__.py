"""Who holds a job up: from the evidence of ranks to culprits, or to `not decided`.

Nothing here reads or prints. Each module takes one source of evidence and answers with culprits;
where the evidence does not carry a name, the answer says so.
"""

from evener.tools.analyze.stuck.culprit import Culprit
from evener.tools.analyze.stuck.decide import decide

__all__ = ["Culprit", "decide"]
