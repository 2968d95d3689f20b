//! Where cargo has put the library, and the environment that it reads.

#![allow(dead_code, reason = "each test file uses a part")]

use std::path::PathBuf;

pub fn path() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap();
    [folder, folder.parent().unwrap()]
        .iter()
        .map(|folder| folder.join("libnccl_net_evener.so"))
        .find(|path| path.exists())
        .unwrap()
}

pub fn environment() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: before the library has started a thread, and no test reads what it writes.
        unsafe {
            std::env::set_var("EVENER_NET_IFNAME", "=lo");
            std::env::set_var("EVENER_NET_FLOWS", "4");
        }
    });
}
