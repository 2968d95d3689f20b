"""`horovod.data`: data loaders that read ahead in a thread."""

from __future__ import annotations

from evener.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
