//! Origins that another program opens on this host while writes to the disk are on flash only.
//!
//! A backup that reads the origin then copies old data without a sign of it, so the event `dirty-file-opened` reports it, as
//! for files of a datastore ([`hearth_datastore::opens`]). `hearth disk flush NAME --hold` is the remedy.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use hearth_datastore::opens::{Opens, name_process};
use hearth_engine::api::DiskId;
use hearth_events::Event;
use hearth_io::Target;

use super::{Daemon, lock};
use crate::origin;
use crate::spot::Mounts;
use crate::workers::Class;

/// Programs that look at every block device of a host, as often as every few seconds. None of them copies one.
const LABEL_READERS: [&str; 19] = [
    "(udev-worker)",
    "blkid",
    "fdisk",
    "hearth",
    "losetup",
    "lsblk",
    "lvdisplay",
    "lvm",
    "lvs",
    "mdadm",
    "multipathd",
    "parted",
    "pvs",
    "pvscan",
    "sfdisk",
    "smartctl",
    "systemd-udevd",
    "udisksd",
    "vgs",
];

/// One of the files or devices a disk's origin is written through.
type Part = (DiskId, usize);

/// A file or device that is watched.
struct Watched {
    path: PathBuf,
    is_device: bool,
}

/// The thread that reports, until dropped.
pub(super) struct OriginOpens {
    opens: Arc<Opens<Part>>,
    watched: Mutex<HashMap<DiskId, Vec<Watched>>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for OriginOpens {
    fn drop(&mut self) {
        self.opens.end();
        if let Some(thread) = self.thread.take()
            // It may be the one that drops the last of the daemon.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread that watches for opened origins ended abnormally");
        }
    }
}

impl OriginOpens {
    /// Watches these files from now on, in place of those watched before. May block.
    fn watch(&self, id: DiskId, paths: Vec<PathBuf>) {
        let stand_for = |path: PathBuf| {
            let file = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_PATH | libc::O_CLOEXEC)
                .open(&path)
                .ok()?;
            let is_device = file.metadata().ok()?.file_type().is_block_device();
            Some((file, Watched { path, is_device }))
        };
        let opened: Vec<_> = paths.into_iter().filter_map(stand_for).collect();
        self.leave(id);
        let mut all = Vec::with_capacity(opened.len());
        for (n, (file, part)) in opened.into_iter().enumerate() {
            self.opens.watch((id, n), &file);
            all.push(part);
        }
        lock(&self.watched).insert(id, all);
    }

    /// Stops watching the files of a disk. Does not block: a stop must not wait for a mount that hangs.
    fn leave(&self, id: DiskId) {
        let all = lock(&self.watched).remove(&id).unwrap_or_default();
        for n in 0..all.len() {
            self.opens.forget(&(id, n));
        }
    }
}

impl Daemon {
    /// Starts the thread, unless the kernel does not report opens.
    pub(super) fn start_opens(self: &Arc<Daemon>) -> std::io::Result<()> {
        let Some(opens) = Opens::new().map(Arc::new) else {
            return Ok(());
        };
        let (daemon, seen) = (Arc::downgrade(self), opens.clone());
        let body = move || {
            seen.keep(|opened| {
                let Some(daemon) = daemon.upgrade() else {
                    return false;
                };
                for (part, process) in opened {
                    daemon.origin_opened(&seen, *part, *process);
                }
                true
            });
        };
        let thread = std::thread::Builder::new()
            .name("hearth-opens".to_owned())
            .spawn(body)?;
        let all = OriginOpens {
            opens,
            watched: Mutex::default(),
            thread: Some(thread),
        };
        // Started once.
        let _ = self.opens.set(Arc::new(all));
        Ok(())
    }

    /// Watches the files and devices that a disk's origin is written through, as its record names them now. Does not
    /// wait for them.
    pub(super) fn watch_origin(&self, id: DiskId) {
        let (Some(opens), Some(record)) = (self.opens.get(), self.seen.record(id)) else {
            return;
        };
        let origin = origin::parse(&record.origin).ok();
        let Some(spec) = origin.filter(|_| !record.is_flash_only()) else {
            return opens.leave(id);
        };
        let legs = hearth_origin::parts(&spec);
        let mut paths: Vec<PathBuf> = legs.iter().filter_map(hearth_origin::local_path).collect();
        let below = hearth_origin::files_of(&record.chain).into_iter();
        paths.extend(below.filter(|(_, written)| *written).map(|(path, _)| path));
        if paths.is_empty() {
            return opens.leave(id);
        }
        let (opens, targets) = (opens.clone(), self.targets.clone());
        let spot = Mounts::now().spot_of(&record.origin);
        self.aside(&spot, Class::Background, move || {
            opens.watch(id, paths);
            // It may have been released before it was watched.
            if targets.get(Target::Origin(id)).is_none() {
                opens.leave(id);
            }
        });
    }

    /// Stops watching a disk's origin.
    pub(super) fn ignore_origin(&self, id: DiskId) {
        if let Some(opens) = self.opens.get() {
            opens.leave(id);
        }
    }

    fn origin_opened(&self, opens: &Opens<Part>, (id, n): Part, process: u32) {
        let owed = self.engine.status(id).map_or(0, |s| s.owed_bytes());
        if owed == 0 {
            return;
        }
        let found = self.opens.get().and_then(|all| {
            let watched = lock(&all.watched);
            let part = watched.get(&id)?.get(n)?;
            Some((part.path.display().to_string(), part.is_device))
        });
        let (Some((file, is_device)), Some(record)) = (found, self.seen.record(id)) else {
            return;
        };
        if is_expected(process, is_device) || !opens.is_due(&(id, n)) {
            return;
        }
        self.events.tell(Event::DirtyFileOpened {
            datastore: None,
            disk: Some(record.name.clone()),
            file,
            dirty_bytes: owed,
            by: name_process(process),
            hold: format!("hearth disk flush {} --hold", record.name),
        });
    }
}

/// True for a process of ours that opens an image for us, and for those that look at the labels of all devices.
fn is_expected(process: u32, is_device: bool) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{process}/stat")) else {
        return false;
    };
    // `PID (NAME) STATE PPID …`; the name may hold anything (proc(5)).
    let Some((name, rest)) = stat.rsplit_once(')') else {
        return false;
    };
    let name = name.split_once('(').map_or("", |(_, name)| name);
    let parent = rest.split_ascii_whitespace().nth(1);
    parent.is_some_and(|ppid| ppid == std::process::id().to_string())
        || is_device && LABEL_READERS.contains(&name)
}
