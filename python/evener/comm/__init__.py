"""The collective layer: topology, buckets, collectives, forms.

Start reading at `reducer` (what the front doors use; `rounds` where ranks average weights every N
steps; `hub` where these are nodes that come and go), then `world`, `buckets`, `lanes`, `wires`.
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
    "hub",
    "lookups",
    "mirrors",
    "options",
    "overlap",
    "pace",
    "planner",
    "profile",
    "reducer",
    "replica_plan",
    "replicas",
    "rounds",
    "scalers",
    "sharded",
    "state",
    "steps",
    "total_norm",
    "transport",
    "watch",
    "wires",
    "world",
]
