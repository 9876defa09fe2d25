//! Where an operation on an origin may get stuck.
//!
//! What works or hangs as one is one spot: a server with all its exports, a mount of a network file system
//! with all that lies on it, a device. Of files on a local disk each directory is one: what hangs there is
//! one file rather than all. The answer must not depend on what it is asked about, which may hang, so paths
//! are taken as they are written, and compared with the kernel's list of mounts.

use std::path::{Path, PathBuf};

use hearth_io::Source;

use crate::origin;
use crate::workers::Spot;

/// Longest name of a server that is shown.
const NAME_MAX: usize = 200;

/// Types of file systems that hang when somebody else does, as mountinfo spells them.
const REMOTE: [&str; 14] = [
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "gpfs", "lustre", "nfs", "nfs4",
    "ocfs2", "smb3", "virtiofs",
];

/// Where file systems are mounted that may hang as a whole.
#[derive(Debug, Default)]
pub(crate) struct Mounts(Vec<PathBuf>);

impl Mounts {
    /// As they are now.
    pub(crate) fn now() -> Mounts {
        // Without it, directories have to do.
        Mounts::from_text(&std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
    }

    fn from_text(text: &str) -> Mounts {
        let remote = |line: &str| {
            let (mount, source) = line.split_once(" - ")?;
            let kind = source.split(' ').next()?;
            let is_remote = REMOTE.contains(&kind) || kind.starts_with("fuse.");
            is_remote.then(|| mount.split(' ').nth(4).map(unescaped))?
        };
        Mounts(text.lines().filter_map(remote).collect())
    }

    /// Where an operation on an origin, as users write it, may get stuck.
    pub(crate) fn spot_of(&self, origin: &str) -> Spot {
        let Ok(spec) = origin::parse(origin) else {
            return Spot::new("an origin nobody understands");
        };
        if let Some(path) = hearth_origin::local_path(&spec) {
            return self.spot_of_path(&path);
        }
        if let Some(socket) = hearth_origin::socket(&spec) {
            return Spot::new(socket.display().to_string());
        }
        if hearth_origin::legs(&spec).is_some() {
            // Its legs are waited for within bounds, wherever they are.
            let name: String = origin.chars().take(NAME_MAX).collect();
            return Spot::new(name);
        }
        let Source::Other { scheme, rest } = &spec.source else {
            return Spot::new(origin);
        };
        let rest = rest.trim_start_matches('/');
        let server = rest.split(['/', '?']).next().unwrap_or_default();
        let name: String = server.chars().take(NAME_MAX).collect();
        Spot::new(format!("{scheme}:{name}"))
    }

    /// The same of a file or device of this host.
    pub(crate) fn spot_of_path(&self, path: &Path) -> Spot {
        let mounts = self.0.iter().filter(|mount| path.starts_with(mount));
        let place = match mounts.max_by_key(|mount| mount.as_os_str().len()) {
            Some(mount) => mount,
            None if path.starts_with("/dev") => path,
            None => path.parent().unwrap_or(path),
        };
        Spot::new(place.display().to_string())
    }
}

/// Where an operation on an origin may get stuck.
pub(crate) fn of(origin: &str) -> Spot {
    Mounts::now().spot_of(origin)
}

/// A path out of mountinfo, where a backslash and three octal digits stand for blanks and backslashes
/// (proc_pid_mountinfo(5)).
fn unescaped(text: &str) -> PathBuf {
    let mut path = text.to_owned();
    // The backslash last: what it stands for is not read again.
    for (code, char) in [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ] {
        path = path.replace(code, char);
    }
    PathBuf::from(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hangs_as_one_is_one_spot() {
        let mounts = Mounts::from_text(
            "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
             40 22 0:44 / /mnt/nas rw,relatime shared:9 - nfs4 nas:/vm rw\n\
             41 22 0:45 / /mnt/with\\040blank rw - fuse.sshfs host:/ rw\n\
             42 22 8:2 / /mnt/local rw - xfs /dev/sda2 rw\n",
        );
        let spot = |origin: &str| mounts.spot_of(origin).to_string();
        // A directory per machine, all on one server.
        assert_eq!(spot("/mnt/nas/100/disk.raw"), "/mnt/nas");
        assert_eq!(spot("qcow2:/mnt/nas/101/disk.qcow2"), "/mnt/nas");
        assert_eq!(spot("file:/mnt/with blank/x"), "/mnt/with blank");
        assert_eq!(spot("/mnt/local/a/disk.raw"), "/mnt/local/a");
        assert_ne!(spot("/mnt/local/a/disk.raw"), spot("/mnt/local/b/disk.raw"));
        // A name that only begins like the mount's.
        assert_eq!(spot("/mnt/nas2/disk.raw"), "/mnt/nas2");
        assert_eq!(spot("/dev/vg/a"), "/dev/vg/a");
        assert_ne!(spot("/dev/sdx"), spot("/dev/sdy"));
    }

    #[test]
    fn the_exports_of_a_server_are_one_spot() {
        let spot = |origin: &str| Mounts::default().spot_of(origin).to_string();
        assert_eq!(spot("nbd://nas:10809/a"), spot("nbd://nas:10809/b"));
        assert_ne!(spot("nbd://nas:10809/a"), spot("nbd://other:10809/a"));
        assert_eq!(spot("nbd+unix:///a?socket=/run/s"), "/run/s");
    }
}
