"""Embedding tables for PyTorch whose keys come and go, on Evener's store.

    from evener.embedding.torch import DynamicEmbeddingBag, DynamicOptimizer

    bag = DynamicEmbeddingBag(16, name="items")          # no vocabulary: any int64 is a key
    optimizer = DynamicOptimizer(model, torch.optim.Adam(model.parameters()))

Start reading at `table` (what a module and an optimizer share), then `modules`, `optimizer`,
`lookups`, `sharded`, `cache`; who comes from torchrec at `collections`. `dcp` is apart: it imports
torch.distributed.checkpoint.
"""

from evener.embedding.torch.checkpoint import load, save
from evener.embedding.torch.collections import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from evener.embedding.torch.describe import describe
from evener.embedding.torch.jagged import Jagged, JaggedTensor, KeyedTensor
from evener.embedding.torch.modules import DynamicEmbedding, DynamicEmbeddingBag
from evener.embedding.torch.optimizer import DynamicOptimizer, clip_grad_norm_, no_sync, tables
from evener.embedding.torch.plain import export, fill
from evener.embedding.torch.traffic import Traffic

__all__ = [
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "DynamicOptimizer",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "Jagged",
    "JaggedTensor",
    "KeyedTensor",
    "Traffic",
    "clip_grad_norm_",
    "describe",
    "export",
    "fill",
    "load",
    "no_sync",
    "save",
    "tables",
]
