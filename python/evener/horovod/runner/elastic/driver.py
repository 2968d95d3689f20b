"""Times of elastic jobs. Upstream's driver is not served: evener.tools.launch.elastic is ours."""

from __future__ import annotations

# Seconds between two looks at the hosts, for `horovod.ray`.
DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
