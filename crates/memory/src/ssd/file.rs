//! The file: in a folder that is given, without a name, its room taken before anything is written.
//!
//! It is unlinked as soon as it is open: the room is given back when the process ends, however it
//! ends, and no file of a job that was killed fills the disk.

use crate::ssd::SsdError;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// An open file of one size.
#[derive(Debug)]
pub struct Opened {
    /// It.
    pub file: File,
    /// Whether it is read and written past the page cache.
    pub direct: bool,
    /// Whether all its room was taken.
    pub reserved: bool,
}

fn open(folder: &Path, direct: bool) -> io::Result<File> {
    let mut last = io::Error::from_raw_os_error(libc::EEXIST);
    for number in 0..100 {
        let path = folder.join(format!(".evener-ssd-{}-{number}", std::process::id()));
        let mut how = OpenOptions::new();
        how.read(true).write(true).create_new(true).mode(0o600);
        if direct {
            how.custom_flags(libc::O_DIRECT);
        }
        match how.open(&path) {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => last = error,
            Err(error) => {
                // Some file systems make the file and then refuse O_DIRECT.
                let _ = std::fs::remove_file(&path);
                return Err(error);
            }
        }
    }
    Err(last)
}

/// Bytes that the folder's file system has free for this user; 0 where it does not say.
pub fn free(folder: &Path) -> u64 {
    let Ok(name) = std::ffi::CString::new(folder.as_os_str().as_encoded_bytes()) else {
        return 0;
    };
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    #[allow(unsafe_code, reason = "the one place that asks for free room")]
    // SAFETY: `name` ends with a zero byte, `found` is a whole structure of zeros that the call
    // fills, and zeros are a value of it.
    let found = unsafe {
        if libc::statvfs(name.as_ptr(), found.as_mut_ptr()) != 0 {
            return 0;
        }
        found.assume_init()
    };
    found.f_bavail.saturating_mul(found.f_frsize)
}

fn reserve(file: &File, size: u64) -> io::Result<()> {
    let length =
        libc::off_t::try_from(size).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    #[allow(unsafe_code, reason = "the one place that takes the room")]
    // SAFETY: a call by numbers; the file is open for as long as it runs.
    let code = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) };
    if code == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

/// A file of `size` bytes in `folder`; `direct`: past the page cache, where the file system can.
///
/// # Errors
/// [`SsdError::Open`], [`SsdError::Full`].
pub fn make(folder: &Path, size: u64, direct: bool) -> Result<Opened, SsdError> {
    let failed = |source| SsdError::Open {
        folder: folder.to_owned(),
        source,
    };
    let (file, direct) = match open(folder, direct) {
        Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => {
            (open(folder, false).map_err(failed)?, false)
        }
        other => (other.map_err(failed)?, direct),
    };
    let full = |source| SsdError::Full {
        folder: folder.to_owned(),
        wanted: size,
        free: free(folder),
        source,
    };
    let reserved = match reserve(&file, size) {
        Ok(()) => true,
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            // The room cannot be taken; that it is there now is the most that can be known.
            if free(folder) < size {
                return Err(full(io::Error::from_raw_os_error(libc::ENOSPC)));
            }
            file.set_len(size).map_err(full)?;
            false
        }
        Err(error) => return Err(full(error)),
    };
    Ok(Opened {
        file,
        direct,
        reserved,
    })
}
