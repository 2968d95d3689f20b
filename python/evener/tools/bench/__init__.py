"""`evener bench`: what training and its parts cost on this machine and this network."""

__all__ = ["train"]
