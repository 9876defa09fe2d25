//! The files of the host that users of the console see: those they may use, and no others.

use std::fs;
use std::path::Path;

use hearth_fault::Fault;
use serde::Serialize;

use crate::settings::Settings;

/// Most entries of a directory that are shown.
const ENTRIES_MAX: usize = 5000;

/// Something in a directory.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Entry {
    /// Name.
    pub name: String,
    /// All of its path.
    pub path: String,
    /// `directory`, `file` or `device`.
    pub kind: &'static str,
    /// Bytes of a file.
    pub size: u64,
}

/// What is in a directory.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Listing {
    /// The directory; empty for the list of those that may be reached.
    pub path: String,
    /// The directory above it, if that may be reached.
    pub parent: Option<String>,
    /// What is in it, directories first.
    pub entries: Vec<Entry>,
    /// There is more than is shown.
    pub more: bool,
}

/// What may be reached in a directory. Without one: the directories and devices of the list.
pub(crate) fn browse(settings: &Settings, path: Option<&str>) -> Result<Listing, Fault> {
    let Some(path) = path else {
        let roots = settings.paths.iter();
        let entries = roots.filter_map(|r| entry(settings, r, r.display().to_string()));
        return Ok(Listing {
            path: String::new(),
            parent: None,
            entries: entries.collect(),
            more: false,
        });
    };
    let real = settings.reach().resolve(Path::new(path))?;
    let all = fs::read_dir(&real).map_err(|e| {
        Fault::new(
            format!("cannot read {path}: {e}"),
            "the user who runs the console must be able to",
        )
    })?;
    let mut entries = Vec::new();
    let mut more = false;
    for found in all.flatten() {
        if entries.len() == ENTRIES_MAX {
            more = true;
            break;
        }
        let name = found.file_name().to_string_lossy().into_owned();
        entries.extend(entry(settings, &found.path(), name));
    }
    entries.sort_by(|a: &Entry, b: &Entry| {
        (a.kind != "directory", &a.name).cmp(&(b.kind != "directory", &b.name))
    });
    let above = real
        .parent()
        .filter(|above| settings.reach().resolve(above).is_ok());
    Ok(Listing {
        path: real.display().to_string(),
        parent: Some(above.map_or(String::new(), |p| p.display().to_string())),
        entries,
        more,
    })
}

/// An entry, if it may be reached and is something a disk may lie in.
fn entry(settings: &Settings, path: &Path, name: String) -> Option<Entry> {
    let real = settings.reach().resolve(path).ok()?;
    let meta = fs::metadata(&real).ok()?;
    let kind = if meta.is_dir() {
        "directory"
    } else if meta.is_file() {
        "file"
    } else if settings.reach().file(&real).is_ok() {
        "device"
    } else {
        return None;
    };
    Some(Entry {
        name,
        path: path.to_str()?.to_owned(),
        kind,
        size: if meta.is_file() { meta.len() } else { 0 },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn world() -> (tempfile::TempDir, Settings) {
        let tmp = tempfile::tempdir().unwrap();
        let root = tmp.path().join("vms");
        fs::create_dir_all(root.join("sub")).unwrap();
        fs::create_dir(tmp.path().join("vms-of-others")).unwrap();
        fs::write(root.join("a.raw"), "a").unwrap();
        fs::write(root.join("sub/b.qcow2"), "b").unwrap();
        fs::write(tmp.path().join("vms-of-others/c.raw"), "c").unwrap();
        symlink("/etc/passwd", root.join("passwd")).unwrap();
        symlink("/dev/null", root.join("null")).unwrap();
        symlink("..", root.join("up")).unwrap();
        symlink("a.raw", root.join("link.raw")).unwrap();
        let settings = Settings {
            paths: vec![root],
            ..Settings::default()
        };
        (tmp, settings)
    }

    #[test]
    fn browsing_shows_only_what_may_be_reached() {
        let (_tmp, settings) = world();
        let roots = browse(&settings, None).unwrap();
        assert_eq!(roots.entries.len(), 1);
        let listing = browse(&settings, Some(&roots.entries[0].path)).unwrap();
        let names: Vec<&str> = listing.entries.iter().map(|e| e.name.as_str()).collect();
        assert_eq!(names, ["sub", "a.raw", "link.raw"]);
        assert_eq!(listing.parent.as_deref(), Some(""));
        let up = format!("{}/up", roots.entries[0].path);
        for outside in ["/", "/etc", "/proc/self", "", "..", &up] {
            assert!(browse(&settings, Some(outside)).is_err(), "{outside}");
        }
    }
}
