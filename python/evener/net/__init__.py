"""The NCCL plug-in: where it is, and what makes NCCL load it.

docs/guide/network.md shows it from outside.
"""

from evener.net.plugin import PluginError, adopt, environment, plugin_path

__all__ = ["PluginError", "adopt", "environment", "plugin", "plugin_path", "prometheus", "stats"]
