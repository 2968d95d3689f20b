//! The addresses of a process, as it and its peers know them.

use std::net::IpAddr;

/// Most addresses of a process, and NICs of a node.
pub const MOST: usize = 16;

/// All addresses of a process; each keeps its place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Addresses {
    /// How often they have changed.
    pub edition: u32,
    /// At most [`MOST`].
    pub list: Vec<IpAddr>,
}

impl Addresses {
    /// Takes what the process has said itself, if it is newer than this, or tells more: a handle holds
    /// only some of them. Whether it was.
    pub fn learn(&mut self, said: &Addresses) -> bool {
        let newer = (said.edition, said.list.len()) > (self.edition, self.list.len());
        if newer {
            self.clone_from(said);
        }
        newer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_newer_or_tells_more_is_learnt() {
        let said = |edition, count: u8| Addresses {
            edition,
            list: (0..count).map(|at| IpAddr::from([10, 0, 0, at])).collect(),
        };
        let mut known = said(0, 2);
        assert!(known.learn(&said(0, 3)) && known == said(0, 3));
        assert!(!known.learn(&said(0, 2)) && !known.learn(&said(0, 3)));
        assert!(known.learn(&said(2, 1)) && known == said(2, 1));
        // It was said before, and comes later.
        assert!(!known.learn(&said(1, 5)) && known == said(2, 1));
    }
}
