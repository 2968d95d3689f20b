"""The declarations of environment variables: what is allowed, what is refused, and how."""

import pytest

from evener.base import settings
from evener.base.settings import SettingError
from evener.base.units import has_unit, parse_rate, parse_size
from evener.errors import UsageError


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
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("64M", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("2kb", 2000),
        ("24GB", 24 * 10**9),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_unit_means_one_thing_and_a_number_alone_nothing() -> None:
    assert parse_size("24G") == parse_size("24GiB") == 24 << 30
    assert parse_size("24GB") == 24 * 10**9
    assert has_unit("24GB") and has_unit("0") and not has_unit("24") and not has_unit("1.5")
    assert parse_rate("25GB/s") == 8 * parse_rate("25gbit")
    with pytest.raises(UsageError, match="'25' has no unit"):
        parse_rate("25", "--network")
    with pytest.raises(UsageError, match="'25GB' is a size, and a rate is wanted"):
        parse_rate("25GB")


def test_unset_and_empty_mean_the_default() -> None:
    assert settings.LIGHT_INTRA_SIZE.get({"LIGHT_INTRA_SIZE": " "}) == 8
    assert not settings.LIGHT_INTRA_SIZE.is_set({"LIGHT_INTRA_SIZE": ""})


def test_every_default_is_a_value_that_would_be_accepted() -> None:
    for setting in settings.registry().values():
        shown = setting.show(setting.default)
        assert setting.get({setting.name: shown}) == setting.default


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("EVENER_TIMOUT", "EVENER_TIMEOUT"),
        ("LIGHT_TOPK_ALLREDCE", "LIGHT_TOPK_ALLREDUCE"),
        ("LIGTH_2D_ALLREDUCE", "LIGHT_2D_ALLREDUCE"),
        ("evener_timeout", "EVENER_TIMEOUT"),
        ("HOROVOD_FUSION_TRESHOLD", "HOROVOD_FUSION_THRESHOLD"),
    ],
)
def test_a_name_that_is_nearly_a_settings_is_found(name: str, meant: str) -> None:
    (line,) = settings.misspelt([name])
    assert line.startswith(f"{name} is not a setting") and line.endswith(f"; {meant} is one")


def test_a_name_of_eveners_that_is_no_setting_is_found() -> None:
    (line,) = settings.misspelt(["EVENER_QUITE_ANOTHER"])
    assert "EVENER_QUITE_ANOTHER is not a setting" in line and "`evener settings`" in line


def test_names_of_others_are_left_alone() -> None:
    # Names of upstream Horovod, NCCL and launchers, and our own between processes.
    horovod = "NUM_NCCL_STREAMS HIERARCHICAL_ALLREDUCE AUTOTUNE ELASTIC HOSTNAME RANK LOG_LEVEL "
    horovod += "GLOO_TIMEOUT_SECONDS CONTROLLER CPU_OPERATIONS GPU_OPERATIONS THREAD_AFFINITY "
    horovod += "GLOO_RENDEZVOUS_ADDR START_TIMEOUT BATCH_D2D_MEMCOPIES AUTOTUNE_LOG"
    others = [f"HOROVOD_{name}" for name in horovod.split()]
    others += ["NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_TIMEOUT"]
    others += ["EVENER_LAUNCH_X", "EVENER_TEST_LOG", "_EVENER_COMPLETE", "PATH", "TIMEOUT"]
    assert settings.misspelt(others) == []
    assert settings.misspelt(settings.registry()) == []
