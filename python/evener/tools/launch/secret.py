"""Which variables hold secrets, and how they are shown.

Command lines can be read by every user of a host (`ps`), and terminals are copied into tickets. So
what a variable of such a name holds stands in no command line that Evener starts, and in none that
it prints. It travels to other hosts over the standard input of `guard`, and within the environment
of a process, which only its own user can read.
"""

from __future__ import annotations

import re

HIDDEN = "<hidden>"

# EVENER_RUN holds the key of horovod.run. TOKENIZERS_PARALLELISM and the like are not meant.
_SECRET = re.compile(
    r"(^|_)(TOKENS?|SECRETS?|KEYS?|APIKEYS?|PWD|PASS|AUTH|COOKIES?|JWT|DSN)(_|$)"
    r"|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|^EVENER_RUN$",
    re.IGNORECASE,
)
_PUBLIC = re.compile(r"(OLD)?PWD|.*_KEY_(FILE|PATH)")


def is_secret(name: str) -> bool:
    """Whether a variable of this name is likely to hold a secret."""
    return bool(_SECRET.search(name)) and not _PUBLIC.fullmatch(name)


def shown(name: str, value: str) -> str:
    """`value`, or what stands for it where `name` says that it is a secret."""
    return HIDDEN if is_secret(name) else value
