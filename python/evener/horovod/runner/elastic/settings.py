"""What a launcher of an elastic job was asked for."""

from __future__ import annotations

from typing import Any

from evener.horovod.runner.common.util.settings import BaseSettings


class ElasticSettings(BaseSettings):
    """An attribute for each argument. discovery: stays behind where the settings are pickled."""

    def __init__(
        self,
        discovery: Any,
        min_num_proc: int | None,
        max_num_proc: int | None,
        elastic_timeout: float | None,
        reset_limit: int | None,
        cooldown_range: Any = None,
        **given: Any,
    ) -> None:
        super().__init__(**{**given, "elastic": True})
        self.discovery = discovery
        self.min_num_proc, self.max_num_proc = min_num_proc, max_num_proc
        self.elastic_timeout, self.reset_limit = elastic_timeout, reset_limit
        self.cooldown_range = cooldown_range

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "discovery": None}
