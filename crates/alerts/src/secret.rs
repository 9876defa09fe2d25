//! Secrets, read when they are needed and kept nowhere.
//!
//! A file that others can read is refused: whoever wrote it there was told it is private. What is read is held in a
//! type that does not print itself.

use std::fmt;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Longest secret.
const LENGTH_MAX: u64 = 4096;

/// A secret; it has no way into a log.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The secret itself, for whoever it is meant for.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(a secret)")
    }
}

/// Reads a secret from a file, or from a credential that systemd gave the service; `None` if neither is named.
pub fn read(file: Option<&Path>, credential: Option<&str>) -> Result<Option<Secret>, String> {
    let dir = std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from);
    read_in(file, credential, dir.as_deref())
}

fn read_in(
    file: Option<&Path>,
    credential: Option<&str>,
    dir: Option<&Path>,
) -> Result<Option<Secret>, String> {
    let path = match (file, credential) {
        (Some(file), _) => file.to_owned(),
        (None, None) => return Ok(None),
        (None, Some(name)) => {
            let plain = Path::new(name).file_name().is_some_and(|f| f == name);
            if !plain {
                return Err(format!("“{name}” is no name of a credential"));
            }
            let dir = dir.ok_or_else(|| {
                format!("the credential {name} is not there: this is no service of systemd; use a file, or LoadCredential={name}:PATH in the unit")
            })?;
            dir.join(name)
        }
    };
    let say = |e: std::io::Error| format!("cannot read the secret {}: {e}", path.display());
    let mut file = std::fs::File::open(&path).map_err(say)?;
    let meta = file.metadata().map_err(say)?;
    if meta.mode() & 0o077 != 0 && credential.is_none() {
        return Err(format!(
            "others may read {} (mode {:03o}); `chmod 600` it",
            path.display(),
            meta.mode() & 0o777
        ));
    }
    let mut text = String::new();
    Read::by_ref(&mut file)
        .take(LENGTH_MAX)
        .read_to_string(&mut text)
        .map_err(say)?;
    let text = text.trim_end_matches(['\n', '\r']);
    if text.is_empty() {
        return Err(format!("the secret {} is empty", path.display()));
    }
    Ok(Some(Secret(text.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_others_can_read_is_refused_and_nothing_prints_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p");
        std::fs::write(&path, "hunter2\n").unwrap();
        let chmod =
            |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        chmod(0o644);
        let error = read_in(Some(&path), None, None).unwrap_err();
        assert!(
            error.contains("chmod 600") && !error.contains("hunter2"),
            "{error}"
        );
        chmod(0o600);
        let secret = read_in(Some(&path), None, None).unwrap().unwrap();
        assert_eq!(secret.reveal(), "hunter2");
        assert!(!format!("{secret:?}").contains("hunter2"));
    }

    #[test]
    fn a_credential_is_a_name_in_the_services_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("smtp"), "x").unwrap();
        let of = |name, dir| read_in(None, Some(name), dir);
        assert_eq!(of("smtp", Some(dir.path())).unwrap().unwrap().reveal(), "x");
        assert!(of("smtp", None).unwrap_err().contains("LoadCredential"));
        assert!(of("../smtp", Some(dir.path())).is_err());
        assert_eq!(read_in(None, None, None), Ok(None));
    }
}
