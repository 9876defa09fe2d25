//! A section of the host's file, for a service that reads no other.

use std::path::{Path, PathBuf};

use hearth_daemon::error::Error;
use serde::de::DeserializeOwned;

/// What a file says that is somebody's business: `T` has the section's name for a field, and ignores all others.
/// Nothing is said where no file was named and the usual one is not there; one that was named must be.
/// `remedy` is told with what `T` or `check` do not accept.
pub fn read<T: DeserializeOwned>(
    given: Option<&Path>,
    remedy: &str,
    check: impl FnOnce(&T) -> Result<(), String>,
) -> Result<T, Error> {
    let path = given.map_or_else(|| PathBuf::from(hearth_config::PATH), Path::to_owned);
    let invalid = |what: String| Error::invalid(format!("{}: {what}", path.display()), remedy);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && given.is_none() => String::new(),
        Err(e) => {
            return Err(Error::unavailable(
                format!("cannot read {}: {e}", path.display()),
                "check the path and its permissions",
            ));
        }
    };
    // It says line and column, and what would be allowed there.
    let file: T = toml::from_str(&text).map_err(|e| invalid(e.to_string().trim().to_owned()))?;
    check(&file).map_err(invalid)?;
    Ok(file)
}
