"""What the UDP engine wrote with EVENER_NET_TRACE_DIR: read (`pcapng`), summed up (`summary`),
drawn (`page`).

The engine writes it (crates/engine/src/trace.rs); docs/reference/network-trace.md has the layout.
"""

from evener.net.trace.page import page
from evener.net.trace.pcapng import files, read
from evener.net.trace.summary import summed_up

__all__ = ["files", "page", "read", "summed_up"]
