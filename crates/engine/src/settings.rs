//! The engine's configuration from environment variables. What there is, is declared in
//! python/evener/base/settings.py; `settings_generated.rs` is made from it.

use std::time::Duration;

use crate::config::{Choice, Config};
use crate::nics::Family;
use crate::settings_generated::{self as all, Setting};

/// An environment variable has a value that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value:?} is not {allowed}: set it to {allowed}, or unset it")]
pub struct SettingError {
    name: &'static str,
    value: String,
    allowed: &'static str,
}

/// Looks a variable up.
pub trait Environment {
    /// Its value, if it has one.
    fn get(&self, name: &str) -> Option<String>;
}

/// The process' own.
#[derive(Debug, Clone, Copy)]
pub struct Process;

impl Environment for Process {
    fn get(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }
}

fn text(env: &dyn Environment, setting: &Setting) -> String {
    let value = env.get(setting.name).unwrap_or_default();
    let value = value.trim();
    if value.is_empty() {
        setting.default.to_string()
    } else {
        value.to_string()
    }
}

fn parse<T>(
    env: &dyn Environment,
    setting: &Setting,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<T, SettingError> {
    let value = text(env, setting);
    parse(&value).ok_or(SettingError {
        name: setting.name,
        value,
        allowed: setting.allowed,
    })
}

fn optional(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

/// A choice may be written in any case, as in Python.
fn small(text: &str) -> String {
    text.to_ascii_lowercase()
}

/// What NCCL sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// One of the next two, by the NICs' speed.
    Auto,
    /// One device that uses all NICs, twice.
    Pair,
    /// The same once.
    Aggregate,
    /// One device a NIC.
    Nic,
}

/// What NCCL is to see, beside the engine's own configuration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The engine's.
    pub config: Config,
    /// Its devices.
    pub devices: Devices,
    /// Mb/s to tell; 0: what the drivers say.
    pub speed: u32,
}

impl Settings {
    /// From the environment.
    ///
    /// # Errors
    /// [`SettingError`] for a value that is not allowed.
    pub fn read(env: &dyn Environment) -> Result<Settings, SettingError> {
        let number = |low: usize, high: usize| {
            move |text: &str| {
                text.parse()
                    .ok()
                    .filter(|value| (low..=high).contains(value))
            }
        };
        let flows = parse(env, &all::FLOWS, number(1, 128))?;
        let seconds = |text: &str| {
            let value: f64 = text.parse().ok()?;
            (value > 0.0 && value.is_finite())
                .then(|| Duration::try_from_secs_f64(value).ok())
                .flatten()
        };
        // NCCL's own variables, in the same meaning.
        let interfaces = optional(text(env, &all::IFNAME))
            .or_else(|| env.get("NCCL_SOCKET_IFNAME").and_then(optional));
        let family = match env.get("NCCL_SOCKET_FAMILY").as_deref() {
            Some("AF_INET") => Family::V4,
            Some("AF_INET6") => Family::V6,
            _ => Family::Any,
        };
        let devices = parse(env, &all::DEVICES, |text| match small(text).as_str() {
            "auto" => Some(Devices::Auto),
            "pair" => Some(Devices::Pair),
            "aggregate" => Some(Devices::Aggregate),
            "nic" => Some(Devices::Nic),
            _ => None,
        })?;
        let speed = parse(env, &all::SPEED, number(0, u32::MAX as usize))?;
        Ok(Settings {
            config: Config {
                engine: parse(env, &all::ENGINE, |text| match small(text).as_str() {
                    "tcp" => Some(Choice::Tcp),
                    "udp" => Some(Choice::Udp),
                    "xdp" => Some(Choice::Xdp),
                    _ => None,
                })?,
                interfaces,
                family,
                workers: parse(env, &all::WORKERS, number(0, 16))?,
                flows,
                most_flows: 2 * flows,
                congestion: optional(text(env, &all::CONGESTION)),
                timeout: parse(env, &all::TIMEOUT, seconds)?,
                stats_dir: optional(text(env, &all::STATS_DIR)).map(Into::into),
                trace_dir: optional(text(env, &all::TRACE_DIR)).map(Into::into),
                trace_bytes: parse(env, &all::TRACE_MB, number(1, 1 << 20))? as u64 * 1_000_000,
                ..Config::default()
            },
            devices,
            speed: u32::try_from(speed).unwrap_or(0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    impl Environment for HashMap<&str, &str> {
        fn get(&self, name: &str) -> Option<String> {
            HashMap::get(self, name).map(|value| value.to_string())
        }
    }

    #[test]
    fn defaults_are_what_was_declared() {
        let settings = Settings::read(&HashMap::new()).unwrap();
        let default = Config::default();
        assert_eq!(settings.config.engine, default.engine);
        assert_eq!(settings.devices, Devices::Auto);
        assert_eq!(settings.config.flows, default.flows);
        assert_eq!(settings.config.most_flows, default.most_flows);
        assert_eq!(settings.config.timeout, default.timeout);
        assert_eq!(settings.config.interfaces, None);
        assert_eq!(settings.config.trace_dir, None);
        assert_eq!(settings.config.trace_bytes, default.trace_bytes);
    }

    #[test]
    fn a_choice_may_have_capitals() {
        let settings = Settings::read(&HashMap::from([("EVENER_NET_ENGINE", "UDP")])).unwrap();
        assert_eq!(settings.config.engine, Choice::Udp);
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        for (name, value) in [
            ("EVENER_NET_FLOWS", "0"),
            ("EVENER_NET_WORKERS", "many"),
            ("EVENER_NET_TIMEOUT", "-1"),
            ("EVENER_NET_TIMEOUT", "nan"),
            ("EVENER_NET_DEVICES", "two"),
            ("EVENER_NET_ENGINE", "rdma"),
            ("EVENER_NET_TRACE_MB", "0"),
        ] {
            let refused = Settings::read(&HashMap::from([(name, value)])).unwrap_err();
            assert!(refused.to_string().contains(name), "{refused}");
        }
    }

    #[test]
    fn nccls_interface_is_used_where_ours_is_not_set() {
        let nccl = [("NCCL_SOCKET_IFNAME", "eth1")];
        let settings = Settings::read(&HashMap::from(nccl)).unwrap();
        assert_eq!(settings.config.interfaces.as_deref(), Some("eth1"));
        let both = [
            ("NCCL_SOCKET_IFNAME", "eth1"),
            ("EVENER_NET_IFNAME", "eth2"),
        ];
        let settings = Settings::read(&HashMap::from(both)).unwrap();
        assert_eq!(settings.config.interfaces.as_deref(), Some("eth2"));
    }
}
