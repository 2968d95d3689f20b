//! The snapshots of a folder, by their names.

use super::Kind;
use crate::error::{Result, io};
use std::path::{Path, PathBuf};

/// The files of a folder in their order.
pub fn files(folder: &Path) -> Result<Vec<(u64, Kind, PathBuf)>> {
    let mut found = Vec::new();
    let entries =
        std::fs::read_dir(folder).map_err(io(format!("{} cannot be read", folder.display())))?;
    for entry in entries {
        let path = entry
            .map_err(io(format!("{} cannot be read", folder.display())))?
            .path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
        let parsed = name.strip_suffix(".evs").and_then(|name| {
            let (kind, number) = name.split_once('-')?;
            let kind = match kind {
                "full" => Kind::Full,
                "delta" => Kind::Delta,
                _ => return None,
            };
            Some((number.parse().ok()?, kind))
        });
        if let Some((number, kind)) = parsed {
            found.push((number, kind, path));
        }
    }
    found.sort_by_key(|(number, _, _)| *number);
    Ok(found)
}
