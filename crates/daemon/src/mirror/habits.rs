//! How a mirror is copied to and scrubbed, and what scrubs have found: a file of the state directory for each mirror.
//!
//! If it is lost, a scrub begins anew and rates are those of the beginning; nothing rests on it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use hearth_format::Uuid;
use hearth_mirror::Habits;

/// Largest file that is read: many differences with long names.
const MOST: u64 = 16 << 20;

pub(crate) fn path(dir: &Path, serial: &Uuid) -> PathBuf {
    dir.join(format!("{serial}.json"))
}

/// What is kept, or what holds unless something else was asked for.
pub(crate) fn load(path: &Path) -> Habits {
    let read = fs::metadata(path).and_then(|meta| match meta.len() <= MOST {
        true => fs::read(path),
        false => Err(io::ErrorKind::InvalidData.into()),
    });
    let habits = read.and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
    match habits {
        Ok(habits) => habits,
        Err(e) => {
            if e.kind() != io::ErrorKind::NotFound {
                tracing::warn!("{} cannot be read and is begun anew: {e}", path.display());
            }
            Habits::default()
        }
    }
}

/// Keeps them, so that after a crash there are these or the ones before.
pub(crate) fn store(path: &Path, habits: &Habits) -> io::Result<()> {
    let bytes = serde_json::to_vec_pretty(habits)?;
    let new = path.with_extension("json.new");
    let mut file = File::create(&new)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    match path.parent() {
        Some(dir) => File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_mirror::habits::Undecided;

    #[test]
    fn what_was_asked_for_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = path(dir.path(), &Uuid::nil());
        assert_eq!(load(&path), Habits::default());
        let mut habits = Habits {
            rate: 5,
            paused: true,
            every_days: 7,
            ..Habits::default()
        };
        habits.scrub.undecided.push(Undecided {
            offset: 4096,
            len: 8192,
            legs: vec![("/a".to_owned(), 1), ("/b".to_owned(), 2)],
            cached: false,
        });
        store(&path, &habits).unwrap();
        assert_eq!(load(&path), habits);
        // What a later version adds is no reason to forget the rest.
        fs::write(&path, r#"{"rate": 9, "later": {"x": []}}"#).unwrap();
        assert_eq!(load(&path).rate, 9);
        fs::write(&path, "{").unwrap();
        assert_eq!(load(&path), Habits::default());
    }
}
