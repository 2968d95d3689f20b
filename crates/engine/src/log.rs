//! Log lines.

/// How loud a log line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Something failed for good.
    Error,
    /// Something is wrong.
    Warn,
    /// A choice, a change.
    Info,
    /// For those who look for something.
    Debug,
}

/// Where log lines go.
pub type Log = Box<dyn Fn(Level, &str) + Send + Sync>;
