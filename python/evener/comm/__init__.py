"""The collective layer: topology, buckets, collectives, forms.

Start reading at `reducer` (what the front doors use), then `topology`, `buckets`, `lanes`, `wires`.
"""

__all__ = [
    "buckets",
    "codecs",
    "errors",
    "exchange",
    "forms",
    "groups",
    "guard",
    "lookups",
    "options",
    "overlap",
    "planner",
    "profile",
    "reducer",
    "replica_plan",
    "replicas",
    "state",
    "steps",
    "transport",
    "watch",
    "wires",
    "world",
]
