//! The files and servers that callers other than root may name.
//!
//! A caller who adds a disk decides what the daemon, which is root as a rule, opens and gives to a guest. So he
//! can name nothing but files below the directories that the host's administrator listed, and exports of
//! the servers he listed. What a name stands for counts, not how it is written: links are followed first. A device is
//! allowed only if it is listed itself. Files that an image names in turn are never allowed from here; that
//! takes `hearth disk add --allow-backing` by root.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use hearth_fault::Fault;
use serde_json::Value;

/// Forms of images in a file, as origins are written.
const IMAGES: [&str; 8] = ["qcow2", "vmdk", "vdi", "vhdx", "vhd", "vpc", "raw", "file"];
/// Where a body of a request is described.
const SEE: &str = "see the API's description at /v1/openapi.json";

/// The lists of allowed paths and servers.
#[derive(Clone, Copy, Debug)]
pub struct Reach<'a> {
    /// Directories below which files may be named, and devices.
    pub paths: &'a [PathBuf],
    /// Servers whose NBD exports may be named, as `HOST` or `HOST:PORT`.
    pub servers: &'a [String],
    /// How a path is listed, in words.
    pub path_remedy: &'static str,
    /// How a server is listed, in words.
    pub server_remedy: &'static str,
}

/// What of a request's body names something of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing.
    Nothing,
    /// `origin` is opened.
    Origin,
    /// `add` is opened.
    Leg,
    /// `origin` is made, or is there and empty.
    Target,
    /// `file` is made.
    Recording,
    /// `new` becomes a flash device; with `size` it is made.
    Flash,
    /// The clients of a datastore and its address are root's to set.
    Datastore,
    /// Files that an image names would be opened.
    Settings,
}

impl Look {
    /// The field that names a file, a device or an export.
    pub fn field(self) -> Option<&'static str> {
        match self {
            Look::Origin | Look::Target => Some("origin"),
            Look::Leg => Some("add"),
            Look::Recording => Some("file"),
            Look::Flash => Some("new"),
            Look::Settings | Look::Datastore | Look::Nothing => None,
        }
    }

    /// The body that is passed on: what it names is allowed, and named as it was found. Looks at files.
    pub fn check(self, reach: Reach<'_>, body: &[u8]) -> Result<Vec<u8>, Fault> {
        if self == Look::Nothing {
            return Ok(body.to_vec());
        }
        let mut value: Value = serde_json::from_slice(body)
            .map_err(|e| Fault::new(format!("the request is not understood: {e}"), SEE))?;
        let fields = value
            .as_object_mut()
            .ok_or_else(|| Fault::new("the request is no object", SEE))?;
        let given = |name: &str| {
            let value = fields.get(name);
            value.is_some_and(|v| !matches!(v, Value::Null | Value::Bool(false)))
        };
        let roots = |what: &str, remedy: &str| Err(Fault::new(what, remedy));
        if given("allow_backing") {
            return roots(
                "only root lets an image open other files",
                "add it with hearth disk add --allow-backing on the host as root",
            );
        }
        if self == Look::Flash && given("force") {
            return roots(
                "only root overwrites what is on a device",
                "take the device with hearth pool on the host as root",
            );
        }
        if self == Look::Datastore && (given("clients") || given("listen")) {
            return roots(
                "only root sets the clients of a datastore and its address",
                "use hearth datastore set on the host as root",
            );
        }
        let is_made = given("size");
        let field = self.field().unwrap_or_default();
        match fields.get(field) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) => {
                let found = match self {
                    Look::Target => reach.target(text),
                    Look::Recording => reach.new_file(text),
                    Look::Flash if is_made => reach.new_file(text),
                    Look::Flash => reach.flash(text),
                    _ => reach.origin(text),
                }?;
                fields.insert(field.to_owned(), Value::String(found));
            }
            Some(_) => return Err(Fault::new(format!("`{field}` is no text"), SEE)),
        }
        // Put together anew, so that what was looked at is what is passed on: a field given twice is there once.
        serde_json::to_vec(&value)
            .map_err(|e| Fault::bare(format!("the request cannot be passed on: {e}")))
    }
}

impl Reach<'_> {
    fn refused(self, what: impl Into<String>) -> Fault {
        Fault::new(what, self.path_remedy)
    }

    /// The directory or device of the list that holds what `path` stands for, and what it stands for.
    pub fn resolve(self, path: &Path) -> Result<PathBuf, Fault> {
        if !path.is_absolute() {
            return Err(self.refused(format!("{} is no absolute path", path.display())));
        }
        // The same words whether it is outside or not there: nobody learns what else is on the host.
        let outside = || {
            self.refused(format!(
                "{} is not below a directory you may reach",
                path.display()
            ))
        };
        let real = fs::canonicalize(path).map_err(|_| outside())?;
        let mut below = self.roots().filter(|root| real.starts_with(root));
        below.next().map(|_| real.clone()).ok_or_else(outside)
    }

    fn roots(self) -> impl Iterator<Item = PathBuf> {
        self.paths.iter().filter_map(|r| fs::canonicalize(r).ok())
    }

    /// An origin to be added, as the daemon opens it.
    pub fn origin(self, text: &str) -> Result<String, Fault> {
        if text.starts_with('/') {
            return Ok(self.file(Path::new(text))?.display().to_string());
        }
        let (form, rest) = text.split_once(':').unwrap_or(("", text));
        if IMAGES.contains(&form) && rest.starts_with('/') {
            let real = self.file(Path::new(rest))?;
            return Ok(format!("{form}:{}", real.display()));
        }
        if let Some(rest) = text.strip_prefix("nbd://") {
            let server = rest.split('/').next().unwrap_or_default();
            let host = server.rsplit_once(':').map_or(server, |(host, _)| host);
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/[]".contains(c);
            let listed = self.servers.iter().any(|s| s == server || s == host);
            if rest.chars().all(plain) && listed {
                return Ok(text.to_owned());
            }
            return Err(Fault::new(
                format!("{server:?} is no server you may use"),
                self.server_remedy,
            ));
        }
        Err(self.refused(format!("{text:?} is nothing you may have opened")))
    }

    /// A flash device to be added: an existing file or a listed device, and no image format.
    pub fn flash(self, text: &str) -> Result<String, Fault> {
        Ok(self.file(Path::new(text))?.display().to_string())
    }

    /// A file or listed device.
    pub fn file(self, path: &Path) -> Result<PathBuf, Fault> {
        let real = self.resolve(path)?;
        let kind = fs::metadata(&real)
            .map_err(|e| Fault::bare(format!("cannot look at {}: {e}", path.display())))?;
        let is_listed = || self.roots().any(|root| root == real);
        if kind.is_file() || (kind.file_type().is_block_device() && is_listed()) {
            return Ok(real);
        }
        Err(self.refused(format!("{} is no file", path.display())))
    }

    /// A file that does not exist yet, to be made in a directory that may be reached.
    pub fn new_file(self, text: &str) -> Result<String, Fault> {
        let path = Path::new(text);
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(self.refused(format!("{text:?} is no file")));
        };
        // `x/.` has a name, and is not where it says.
        if text.ends_with('/') || text.ends_with("/.") {
            return Err(self.refused(format!("{text:?} is no file")));
        }
        let dir = self.resolve(dir)?;
        Ok(dir.join(name).display().to_string())
    }

    /// A file that a disk is moved to: one that is there, which the daemon refuses unless it is empty, or one that is made.
    pub fn target(self, text: &str) -> Result<String, Fault> {
        let path = Path::new(text);
        // A link that leads nowhere is there, too: what would be made lies where it leads.
        match fs::symlink_metadata(path) {
            Ok(_) => Ok(self.file(path)?.display().to_string()),
            Err(_) => self.new_file(text),
        }
    }
}

/// May others than root be given these?
pub fn check_paths<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Result<(), Fault> {
    for path in paths {
        if !path.is_absolute() {
            return Err(Fault::new(
                format!("{} is no absolute path", path.display()),
                "name the directories that users may reach from the root",
            ));
        }
        // Everything would be below it.
        if path.parent().is_none() {
            return Err(Fault::new(
                "users may not be given the whole host",
                "name the directories in which disks lie",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[derive(Default)]
    struct Settings {
        paths: Vec<PathBuf>,
        servers: Vec<String>,
    }

    impl Settings {
        fn reach(&self) -> Reach<'_> {
            Reach {
                paths: &self.paths,
                servers: &self.servers,
                path_remedy: "list it",
                server_remedy: "list it",
            }
        }
    }

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
        };
        (tmp, settings)
    }

    #[test]
    fn only_files_below_the_list_are_opened() {
        let (tmp, settings) = world();
        let root = fs::canonicalize(&settings.paths[0]).unwrap();
        let at = |rest: &str| format!("{}/{rest}", root.display());
        assert_eq!(settings.reach().origin(&at("a.raw")), Ok(at("a.raw")));
        assert_eq!(
            settings.reach().origin(&at("sub/../link.raw")),
            Ok(at("a.raw"))
        );
        let image = format!("qcow2:{}", at("sub/b.qcow2"));
        assert_eq!(settings.reach().origin(&image), Ok(image.clone()));
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
            assert!(settings.reach().origin(&attack).is_err(), "{attack}");
        }
        assert!(settings.reach().origin("nbd://store:10810/x").is_ok());
        assert!(settings.reach().origin("nbd://192.0.2.1:10809/x").is_ok());
        assert!(Settings::default().reach().origin(&at("a.raw")).is_err());
    }

    #[test]
    fn nobody_learns_what_else_is_there() {
        let (_tmp, settings) = world();
        let there = settings.reach().origin("/etc/passwd").unwrap_err();
        let not = settings.reach().origin("/etc/passwx").unwrap_err();
        assert_eq!(there.what.replace("passwd", "passwx"), not.what);
    }

    #[test]
    fn recordings_stay_below_the_list() {
        let (_tmp, settings) = world();
        let root = fs::canonicalize(&settings.paths[0]).unwrap();
        let at = |rest: &str| format!("{}/{rest}", root.display());
        assert_eq!(settings.reach().new_file(&at("t.trace")), Ok(at("t.trace")));
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
            assert!(settings.reach().new_file(&attack).is_err(), "{attack}");
        }
    }

    #[test]
    fn disks_are_moved_to_files_below_the_list() {
        let (_tmp, settings) = world();
        let root = fs::canonicalize(&settings.paths[0]).unwrap();
        let at = |rest: &str| format!("{}/{rest}", root.display());
        assert_eq!(settings.reach().target(&at("new.raw")), Ok(at("new.raw")));
        assert_eq!(settings.reach().target(&at("a.raw")), Ok(at("a.raw")));
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
            assert!(settings.reach().target(&attack).is_err(), "{attack}");
        }
    }
}
