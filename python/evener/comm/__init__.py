"""The collective layer: topology, buckets, collectives, forms.

Start reading at `reducer` (what the front doors use), then `topology`, `buckets`, `lanes`, `wires`.
"""

__all__ = [
    "agree",
    "buckets",
    "codecs",
    "errors",
    "exchange",
    "forms",
    "frozen",
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
    "total_norm",
    "transport",
    "watch",
    "wires",
    "world",
]
