"""Local steps between nodes that come and go: one hub, to which every node dials out.

A node is a job of its own: `torch.distributed` knows only its ranks. Every N steps its first rank
sends the hub how far the node went, and the hub answers all of them with the same bytes.

token       what a node must have to be let in, and the TLS that it makes
frames      messages: bounded, checked, without pickle
membership  who is in, whom the others wait for, when a round ends: no sockets and no clock
shared      the shared weights, the outer step, and the forms in which changes travel
server      the hub
client      a node's connection, in a thread of its own
rounds      what a model has as `model.evener` in such a job

The hub decides alone who is in, so there are never two halves that both go on. It holds the shared
weights and the outer momentum, and so does each node: either side can lose the other.
"""

__all__ = ["client", "frames", "membership", "rounds", "server", "shared", "token"]
