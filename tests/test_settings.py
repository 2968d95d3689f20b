"""The declarations of environment variables: what is allowed, what is refused, and how."""

import pytest

from evener import settings
from evener.settings import SettingError


def test_defaults_are_lightccs() -> None:
    env: dict[str, str] = {}
    assert settings.LIGHT_2D_ALLREDUCE.get(env) is False
    assert settings.LIGHT_INTRA_SIZE.get(env) == 8
    assert settings.LIGHT_HIERARCHICAL_THRESHOLD.get(env) == 1073741824
    assert settings.LIGHT_TOPK_ALLREDUCE.get(env) is False
    assert settings.LIGHT_TOPK_RATIO.get(env) == 0.01
    assert settings.LIGHT_TOPK_THRESHOLD.get(env) == 1048576
    assert settings.LIGHT_TOPK_FP16.get(env) is False
    assert settings.HOROVOD_FUSION_THRESHOLD.get(env) == 134217728


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LIGHT_2D_ALLREDUCE", "2"),
        ("LIGHT_INTRA_SIZE", "0"),
        ("LIGHT_INTRA_SIZE", "two"),
        ("LIGHT_TOPK_RATIO", "0"),
        ("LIGHT_TOPK_RATIO", "1.01"),
        ("LIGHT_TOPK_RATIO", "nan"),
        ("LIGHT_TOPK_THRESHOLD", "-1"),
        ("LIGHT_TOPK_THRESHOLD", "1.0001k"),
        ("HOROVOD_FUSION_THRESHOLD", "64 apples"),
        ("HOROVOD_CYCLE_TIME", "-0.1"),
        ("HOROVOD_CYCLE_TIME", "inf"),
        ("EVENER_LOG", "loud"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: str) -> None:
    setting = settings.registry()[name]
    with pytest.raises(SettingError) as refused:
        setting.get({name: value})
    assert name in str(refused.value)
    assert value in str(refused.value)
    assert setting.allowed in str(refused.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1048576", 1 << 20), ("64M", 64 << 20), ("1.5GiB", 3 << 29), ("2kb", 2048)],
)
def test_sizes(text: str, size: int) -> None:
    assert settings.parse_size(text) == size


def test_unset_and_empty_mean_the_default() -> None:
    assert settings.LIGHT_INTRA_SIZE.get({"LIGHT_INTRA_SIZE": " "}) == 8
    assert not settings.LIGHT_INTRA_SIZE.is_set({"LIGHT_INTRA_SIZE": ""})


def test_every_default_is_a_value_that_would_be_accepted() -> None:
    for setting in settings.registry().values():
        shown = setting.show(setting.default)
        assert setting.get({setting.name: shown}) == setting.default
