//! What NCCL sees of the NICs: by default one device that uses all of them, shown twice.
//!
//! NCCL keeps a fixed number of bytes in flight in a channel, and takes two channels a device where
//! nodes have few GPUs. On a quick network it waits for its own buffers then. So what is quick, or
//! not known to be slow, is shown twice, each with half of the speed, and NCCL takes four channels.
//! On a slow network two are enough, and the fewer the larger its messages are.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::sync::{Arc, Mutex};

use evener_engine::nics::Nic;
use evener_engine::settings::{Devices, Process, Settings};
use evener_engine::{Engine, Level};

use crate::lock::lock;
use crate::log;

/// Mb/s: NICs that carry less than this together are one device.
const QUICK: u32 = 40_000;
/// Mb/s that each of two is told at least. NCCL's table of speeds has nothing between 1.2 and
/// 0.24 GB/s, and with less than 1.2 it takes ten channels a device.
const LEAST: u32 = 10_000;

/// A device as NCCL sees it. NCCL may hold the name and the path for ever.
pub struct Device {
    /// Its name.
    pub name: &'static CStr,
    /// Where its card is in sysfs.
    pub pci_path: Option<&'static CStr>,
    /// Mb/s.
    pub speed: u32,
    /// What carries its comms.
    pub engine: Arc<Engine>,
}

/// A text that stays, each one once: there are as many as interfaces.
fn keep(text: &str) -> &'static CStr {
    static KEPT: Mutex<BTreeSet<&'static CStr>> = Mutex::new(BTreeSet::new());
    let text = CString::new(text).unwrap_or_default();
    let mut kept = lock(&KEPT);
    if let Some(kept) = kept.get(text.as_c_str()) {
        return kept;
    }
    let new: &CStr = Box::leak(text.into_boxed_c_str());
    kept.insert(new);
    new
}

/// Starts the engine, or one for each NIC.
pub fn start() -> Result<Vec<Device>, String> {
    let settings = Settings::read(&Process).map_err(|error| error.to_string())?;
    let start = |config| {
        let engine = Engine::start(config, Box::new(log::say));
        engine.map(Arc::new).map_err(|error| error.to_string())
    };
    let engine = start(settings.config.clone())?;
    let nics = engine.nics().to_vec();
    let told = |speed| {
        if settings.speed > 0 {
            settings.speed
        } else {
            speed
        }
    };
    let speed = told(nics.iter().map(|nic| nic.speed).sum());
    let known = settings.speed > 0 || nics.iter().all(|nic| nic.known);
    let (names, speed, why): (&[&str], u32, &str) = match settings.devices {
        Devices::Auto if known && speed < QUICK => (&["evener"], speed, "a slow network"),
        Devices::Auto | Devices::Pair => {
            let why = match settings.devices {
                Devices::Pair => "asked for",
                _ if known => "a quick network",
                _ => "no driver says how quick it is",
            };
            (&["evener0", "evener1"], (speed / 2).max(LEAST), why)
        }
        Devices::Aggregate => (&["evener"], speed, "asked for"),
        Devices::Nic => {
            drop(engine);
            let device = |nic: &Nic| {
                let mut config = settings.config.clone();
                config.interfaces = Some(format!("={}", nic.name));
                Ok(Device {
                    name: keep(&nic.name),
                    pci_path: nic.pci_path().map(|path| keep(&path)),
                    speed: told(nic.speed),
                    engine: start(config)?,
                })
            };
            return nics.iter().map(device).collect();
        }
    };
    let text = format!("NCCL sees {} of {speed} Mb/s: {why}", names.join(" and "));
    log::say(Level::Info, &text);
    let device = |name: &&str| Device {
        name: keep(name),
        pci_path: None,
        speed,
        engine: engine.clone(),
    };
    Ok(names.iter().map(device).collect())
}
