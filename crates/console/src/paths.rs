//! Which of the host's files users of the console may have opened.
//!
//! Whoever may add a disk decides what the daemon, which is root as a rule, opens and gives to a guest. So an
//! account can name nothing but files below the directories that the host's administrator listed, and exports of
//! the servers he listed. What a name stands for counts, not how it is written: links are followed first. A device is
//! allowed only if it is listed itself. Files that an image names in turn are never allowed from here; that
//! takes `hearth disk add --allow-backing`, by somebody who may read them.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use hearth_fault::Fault;
use serde::Serialize;

use crate::settings::Settings;

/// Forms of images in a file, as origins are written.
const IMAGES: [&str; 6] = ["qcow2", "vmdk", "vdi", "vhdx", "raw", "file"];
/// Most entries of a directory that are shown.
const ENTRIES_MAX: usize = 5000;

fn refused(what: impl Into<String>) -> Fault {
    Fault::new(
        what,
        "the console reaches only what hearth console enable --allow-path lists",
    )
}

/// The directory or device of the list that holds what `path` stands for, and what it stands for.
fn allowed(settings: &Settings, path: &Path) -> Result<PathBuf, Fault> {
    if !path.is_absolute() {
        return Err(refused(format!("{} is no absolute path", path.display())));
    }
    // The same words whether it is outside or not there: nobody learns what else is on the host.
    let outside = || {
        refused(format!(
            "{} is not below a directory you may reach",
            path.display()
        ))
    };
    let real = fs::canonicalize(path).map_err(|_| outside())?;
    let roots = settings
        .paths
        .iter()
        .filter_map(|r| fs::canonicalize(r).ok());
    let mut below = roots.filter(|root| real.starts_with(root));
    below.next().map(|_| real).ok_or_else(outside)
}

/// An origin somebody wants to add, as the daemon is to open it.
pub(crate) fn origin(settings: &Settings, text: &str) -> Result<String, Fault> {
    if text.starts_with('/') {
        return Ok(file(settings, Path::new(text))?.display().to_string());
    }
    let (form, rest) = text.split_once(':').unwrap_or(("", text));
    if IMAGES.contains(&form) && rest.starts_with('/') {
        let real = file(settings, Path::new(rest))?;
        return Ok(format!("{form}:{}", real.display()));
    }
    if let Some(rest) = text.strip_prefix("nbd://") {
        let server = rest.split('/').next().unwrap_or_default();
        let host = server.rsplit_once(':').map_or(server, |(host, _)| host);
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/[]".contains(c);
        if rest.chars().all(plain) && settings.servers.iter().any(|s| s == server || s == host) {
            return Ok(text.to_owned());
        }
        return Err(Fault::new(
            format!("{server:?} is no server you may use"),
            "the console reaches only servers that hearth console enable --allow-server lists",
        ));
    }
    Err(refused(format!("{text:?} is nothing the console opens")))
}

/// A flash device somebody wants to add: a file that is there, or a listed device, and no form of an image.
pub(crate) fn flash(settings: &Settings, text: &str) -> Result<String, Fault> {
    Ok(file(settings, Path::new(text))?.display().to_string())
}

/// A file or listed device.
fn file(settings: &Settings, path: &Path) -> Result<PathBuf, Fault> {
    let real = allowed(settings, path)?;
    let kind = fs::metadata(&real)
        .map_err(|e| Fault::bare(format!("cannot look at {}: {e}", path.display())))?;
    let listed = |real: &Path| {
        let roots = settings
            .paths
            .iter()
            .filter_map(|r| fs::canonicalize(r).ok());
        roots.into_iter().any(|root| root == real)
    };
    if kind.is_file() || (kind.file_type().is_block_device() && listed(&real)) {
        return Ok(real);
    }
    Err(refused(format!("{} is no file", path.display())))
}

/// A file that does not exist yet, to be made in a directory that may be reached.
pub(crate) fn new_file(settings: &Settings, text: &str) -> Result<String, Fault> {
    let path = Path::new(text);
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(refused(format!("{text:?} is no file")));
    };
    // `x/.` has a name, and is not where it says.
    if text.ends_with('/') || text.ends_with("/.") {
        return Err(refused(format!("{text:?} is no file")));
    }
    let dir = allowed(settings, dir)?;
    Ok(dir.join(name).display().to_string())
}

/// A file that a disk is moved to: one that is there, which the daemon refuses unless it is empty, or one that is made.
pub(crate) fn target(settings: &Settings, text: &str) -> Result<String, Fault> {
    let path = Path::new(text);
    // A link that leads nowhere is there, too: what would be made lies where it leads.
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(file(settings, path)?.display().to_string()),
        Err(_) => new_file(settings, text),
    }
}

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
    let real = allowed(settings, Path::new(path))?;
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
        .filter(|above| allowed(settings, above).is_ok());
    Ok(Listing {
        path: real.display().to_string(),
        parent: Some(above.map_or(String::new(), |p| p.display().to_string())),
        entries,
        more,
    })
}

/// An entry, if it may be reached and is something a disk may lie in.
fn entry(settings: &Settings, path: &Path, name: String) -> Option<Entry> {
    let real = allowed(settings, path).ok()?;
    let meta = fs::metadata(&real).ok()?;
    let kind = if meta.is_dir() {
        "directory"
    } else if meta.is_file() {
        "file"
    } else if file(settings, &real).is_ok() {
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
            servers: vec!["store".into(), "192.0.2.1:10809".into()],
            ..Settings::default()
        };
        (tmp, settings)
    }

    #[test]
    fn only_files_below_the_list_are_opened() {
        let (tmp, settings) = world();
        let root = fs::canonicalize(&settings.paths[0]).unwrap();
        let at = |rest: &str| format!("{}/{rest}", root.display());
        assert_eq!(origin(&settings, &at("a.raw")), Ok(at("a.raw")));
        assert_eq!(origin(&settings, &at("sub/../link.raw")), Ok(at("a.raw")));
        let image = format!("qcow2:{}", at("sub/b.qcow2"));
        assert_eq!(origin(&settings, &image), Ok(image.clone()));
        let outside = fs::canonicalize(tmp.path()).unwrap();
        for attack in [
            "/etc/passwd".to_owned(),
            "/dev/sda".to_owned(),
            "/dev/null".to_owned(),
            at("passwd"),
            at("null"),
            at("up/vms-of-others/c.raw"),
            at("../vms-of-others/c.raw"),
            at("../../../../../../etc/passwd"),
            format!("{}/vms-of-others/c.raw", outside.display()),
            at("sub"),
            at("none"),
            "qcow2:/etc/passwd".to_owned(),
            format!("qcow2:{}", at("passwd")),
            "a.raw".to_owned(),
            String::new(),
            format!("qcow2:qcow2:{}", at("a.raw")),
            format!("model-hdd:{}", at("a.raw")),
            format!(
                "json:{{\"driver\":\"file\",\"filename\":\"{}\"}}",
                at("a.raw")
            ),
            "json:{\"driver\":\"host_device\",\"filename\":\"/dev/sda\"}".to_owned(),
            format!("file:json:{}", at("a.raw")),
            format!("nbd+unix:///x?socket={}", at("a.raw")),
            "nbd://elsewhere/x".to_owned(),
            "nbd://store@elsewhere/x".to_owned(),
            "nbd://192.0.2.1/x".to_owned(),
            "nbd://store:1@elsewhere/x".to_owned(),
            "https://store/x.raw".to_owned(),
            format!("{}\0", at("a.raw")),
        ] {
            assert!(origin(&settings, &attack).is_err(), "{attack}");
        }
        assert!(origin(&settings, "nbd://store:10810/x").is_ok());
        assert!(origin(&settings, "nbd://192.0.2.1:10809/x").is_ok());
        assert!(origin(&Settings::default(), &at("a.raw")).is_err());
    }

    #[test]
    fn nobody_learns_what_else_is_there() {
        let (_tmp, settings) = world();
        let there = origin(&settings, "/etc/passwd").unwrap_err();
        let not = origin(&settings, "/etc/passwx").unwrap_err();
        assert_eq!(there.what.replace("passwd", "passwx"), not.what);
    }

    #[test]
    fn recordings_stay_below_the_list() {
        let (_tmp, settings) = world();
        let root = fs::canonicalize(&settings.paths[0]).unwrap();
        let at = |rest: &str| format!("{}/{rest}", root.display());
        assert_eq!(new_file(&settings, &at("t.trace")), Ok(at("t.trace")));
        for attack in [
            "/etc/cron.d/x".to_owned(),
            at("up/x"),
            at("../x"),
            at("sub/."),
            at("sub/"),
            at(".."),
            "x".to_owned(),
            "/".to_owned(),
        ] {
            assert!(new_file(&settings, &attack).is_err(), "{attack}");
        }
    }

    #[test]
    fn disks_are_moved_to_files_below_the_list() {
        let (_tmp, settings) = world();
        let root = fs::canonicalize(&settings.paths[0]).unwrap();
        let at = |rest: &str| format!("{}/{rest}", root.display());
        assert_eq!(target(&settings, &at("new.raw")), Ok(at("new.raw")));
        assert_eq!(target(&settings, &at("a.raw")), Ok(at("a.raw")));
        std::os::unix::fs::symlink("/etc/new.raw", root.join("dangling.raw")).unwrap();
        for attack in [
            "/etc/new.raw".to_owned(),
            "/etc/passwd".to_owned(),
            at("dangling.raw"),
            at("../x"),
            at("sub"),
            at("sub/."),
            "new.raw".to_owned(),
            format!("file:{}", at("new.raw")),
        ] {
            assert!(target(&settings, &attack).is_err(), "{attack}");
        }
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
