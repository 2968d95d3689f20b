"""`evener hub`: the one address to which nodes that come and go dial out."""

__all__ = ["command"]
