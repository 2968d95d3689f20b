//! Environment variables, made from python/evener/base/settings.py by `make docs`.

/// Name, default, and what is allowed, of one environment variable.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// The variable.
    pub name: &'static str,
    /// Its value where it is unset or empty.
    pub default: &'static str,
    /// What it may be, in words.
    pub allowed: &'static str,
}

/// Whether `import evener`, `evener launch` and `evener lab` point NCCL at Evener's plug-in, where neither NCCL_NET nor NCCL_NET_PLUGIN is set. auto: on machines with GPUs, without RDMA devices and with 16 processors or more per rank, for jobs of several nodes.
pub const NET: Setting = Setting {
    name: "EVENER_NET",
    default: "auto",
    allowed: "auto or off or on",
};

/// What carries what a process sends. tcp: streams. udp: Evener's packets over UDP sockets, to processes that take them; to others TCP. xdp: as udp, past the kernel's stack where the card, the kernel and the process's rights allow it.
pub const ENGINE: Setting = Setting {
    name: "EVENER_NET_ENGINE",
    default: "tcp",
    allowed: "tcp or udp or xdp",
};

/// Interfaces that carry NCCL's traffic, by the rules of NCCL_SOCKET_IFNAME (prefixes; `=` exact names; `^` all but these), which is used where this is unset. Neither set: all that run, less loopback, container bridges and link-local addresses.
pub const IFNAME: Setting = Setting {
    name: "EVENER_NET_IFNAME",
    default: "",
    allowed: "a list such as eth0,eth1 or =eth0 or ^docker",
};

/// What NCCL sees. pair: one device that uses all NICs, twice (each with half of the speed, at least 10 Gb/s: NCCL takes twice as many channels). aggregate: the same once. nic: one device a NIC. auto: aggregate where the NICs' drivers say less than 40 Gb/s in all, else pair.
pub const DEVICES: Setting = Setting {
    name: "EVENER_NET_DEVICES",
    default: "auto",
    allowed: "auto or pair or aggregate or nic",
};

/// Speed in Mb/s that NCCL is told of; it steers the choice between tree and ring. 0: the sum of what the NICs' drivers say.
pub const SPEED: Setting = Setting {
    name: "EVENER_NET_SPEED",
    default: "0",
    allowed: "a whole number, 0 or more",
};

/// Worker threads of a process. 0: one for every four processors it may use, 1 to 8.
pub const WORKERS: Setting = Setting {
    name: "EVENER_NET_WORKERS",
    default: "0",
    allowed: "a whole number, 0 to 16",
};

/// TCP connections between two processes at the start. More are opened while throughput grows, up to twice as many.
pub const FLOWS: Setting = Setting {
    name: "EVENER_NET_FLOWS",
    default: "16",
    allowed: "a whole number, 1 to 128",
};

/// Congestion control of TCP connections, the kernel's. Unset: the system's, but cubic instead of bbr.
pub const CONGESTION: Setting = Setting {
    name: "EVENER_NET_CONGESTION",
    default: "",
    allowed: "a name from net.ipv4.tcp_allowed_congestion_control",
};

/// Seconds for which every path to a peer may be dead before its communicators get an error.
pub const TIMEOUT: Setting = Setting {
    name: "EVENER_NET_TIMEOUT",
    default: "60",
    allowed: "a number of seconds above 0",
};

/// Directory in which every process keeps a statistics file, rewritten every second (docs/reference/records.md). Unset: none.
pub const STATS_DIR: Setting = Setting {
    name: "EVENER_STATS_DIR",
    default: "",
    allowed: "a directory",
};

/// Directory in which every process writes what its UDP engine does, packet by packet (docs/reference/network-trace.md); `evener net trace show` and Wireshark read it. Unset: none.
pub const TRACE_DIR: Setting = Setting {
    name: "EVENER_NET_TRACE_DIR",
    default: "",
    allowed: "a directory",
};

/// Most megabytes of trace per process: the last ones are kept.
pub const TRACE_MB: Setting = Setting {
    name: "EVENER_NET_TRACE_MB",
    default: "64",
    allowed: "a whole number, 1 to 1048576",
};

/// Least severe message that is printed. Choices that Evener makes are logged at `info` by rank 0, and by every rank at `debug`.
pub const LOG: Setting = Setting {
    name: "EVENER_LOG",
    default: "info",
    allowed: "error or warning or info or debug",
};
