//! Files and folders of snapshots: whole or not there, in their order, the old ones taken away.

use super::files::files;
use super::read::id_of;
use super::write::{Instant, write};
use super::{Kind, Saved, Saver};
use crate::error::{Result, io};
use crate::table::{Table, lock};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Takes away what processes that were killed left half written.
fn sweep(folder: &Path) -> Result<()> {
    let entries =
        std::fs::read_dir(folder).map_err(io(format!("{} cannot be read", folder.display())))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
        let owner = name
            .strip_prefix('.')
            .and_then(|name| name.strip_suffix(".part"))
            .and_then(|name| name.rsplit_once(".evs."))
            .and_then(|(_, pid)| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = std::fs::remove_file(&path);
        }
    }
    Ok(())
}

/// Writes the next file of a folder.
///
/// # Errors
/// See [`crate::Store::snapshot`].
pub fn into_folder(table: &Table, folder: &Path, kind: Kind) -> Result<Saved> {
    std::fs::create_dir_all(folder).map_err(io(format!("{} cannot be made", folder.display())))?;
    sweep(folder)?;
    let mut saver = lock(&table.saver);
    let before = files(folder)?;
    let number = before.last().map_or(1, |(number, _, _)| number + 1);
    // Whoever reads the folder has its last file before this one: nothing else may be between them.
    let follows = match before.last() {
        None => saver.id.is_empty(),
        Some((_, _, last)) => id_of(last).is_some_and(|id| id == saver.id),
    };
    let kind = match follows {
        true => kind,
        false => Kind::Full,
    };
    let instant = Instant::of_chain(table, kind, &mut saver);
    let kind = instant.kind;
    let name = match kind {
        Kind::Full => "full",
        Kind::Delta => "delta",
    };
    let path = folder.join(format!("{name}-{number:06}.evs"));
    let saved = into_file(table, &path, instant, &mut saver);
    if saved.is_err() {
        // Where only the folder could not be synced the file has its name, but is not in the chain.
        let _ = std::fs::remove_file(&path);
    }
    let saved = saved?;
    if kind == Kind::Full {
        // The full snapshot before this one and its deltas stay; what is older goes.
        let last = before.iter().rposition(|(_, kind, _)| *kind == Kind::Full);
        for (_, _, old) in &before[..last.unwrap_or(0)] {
            // It would be tidier without it, no more: it goes at the next snapshot.
            let _ = std::fs::remove_file(old);
        }
    }
    Ok(saved)
}

/// Writes a file of all rows that is whole or not there, and no part of the chain.
///
/// # Errors
/// See [`crate::Store::save`].
pub fn aside(table: &Table, path: &Path) -> Result<Saved> {
    let mut saver = lock(&table.saver);
    let instant = Instant::aside(table, &mut saver);
    into_file(table, path, instant, &mut saver)
}

fn into_file(table: &Table, path: &Path, instant: Instant, saver: &mut Saver) -> Result<Saved> {
    let what = || format!("{} cannot be written", path.display());
    let name = path
        .file_name()
        .and_then(|n| n.to_str())
        .unwrap_or("snapshot");
    let part = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
    let file = match File::create(&part) {
        Ok(file) => file,
        Err(error) => {
            instant.undo(table);
            return Err(io(what())(error));
        }
    };
    let mut sink = Durable {
        file: BufWriter::with_capacity(1 << 20, file),
        part: part.clone(),
        path: path.to_owned(),
    };
    let saved = write(table, instant, saver, &mut sink, path);
    if saved.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    saved
}

/// A file under another name, which takes its name when it is flushed: the last act of [`body`], so that
/// a failure of the rename is a failure of the snapshot.
struct Durable {
    file: BufWriter<File>,
    part: PathBuf,
    path: PathBuf,
}

impl Write for Durable {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        std::fs::rename(&self.part, &self.path)?;
        if let Some(folder) = self.path.parent() {
            let folder = match folder.as_os_str().is_empty() {
                true => Path::new("."),
                false => folder,
            };
            File::open(folder)?.sync_all()?;
        }
        Ok(())
    }
}
