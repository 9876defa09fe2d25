//! Does what was decided, and sets it back.

use std::io;
use std::path::{Path, PathBuf};

use hearth_memory::{Note, Step, Target};

use crate::guests::Way;
use crate::look::Eyes;
use crate::qmp::Qmp;
use crate::store::RunDir;
use crate::{libvirt, pages};

/// Compressors, the best that a kernel may have first: fast ones, for a page that is wanted must not wait.
const COMPRESSORS: [&str; 3] = ["lz4", "zstd", "lzo-rle"];
/// How often guests are asked for their statistics while a controller runs, in seconds.
const POLLING: u64 = 1;
/// Milliseconds between two goes of comparing pages.
const SHARE_SLEEP: &str = "20";

fn word(path: &Path) -> io::Result<String> {
    Ok(std::fs::read_to_string(path)?.trim().to_owned())
}

/// Sets a file of the kernel's, after it was noted.
fn set(dir: &mut RunDir, path: &Path, value: &str, why: &str) -> io::Result<()> {
    let now = word(path)?;
    if now == value {
        return Ok(());
    }
    dir.about_to(&Target::File(path.to_owned()), &now, value, why)?;
    std::fs::write(path, value)
}

/// The same for what only makes it better: a kernel without it goes on.
fn may_set(dir: &mut RunDir, path: PathBuf, value: &str, why: &str) -> io::Result<()> {
    match set(dir, &path, value, why) {
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::InvalidInput
            ) =>
        {
            Ok(())
        }
        // A compressor that is not there.
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}

/// Makes one step.
pub fn act(eyes: &mut Eyes, dir: &mut RunDir, step: &Step, why: &str) -> io::Result<()> {
    match step {
        Step::Share => share(eyes, dir, why),
        Step::Compress => compress(eyes, dir, why),
        Step::Balloon { guest, from, to } => balloon(eyes, dir, guest, *from, *to, why),
        Step::PageOut { guest, bytes } => {
            let pid = pid(eyes, guest)?;
            page_out(eyes, pid, *bytes)
        }
        Step::ReadBack { guest, bytes } => pages::back(pid(eyes, guest)?, *bytes).map(drop),
    }
}

fn share(eyes: &Eyes, dir: &mut RunDir, why: &str) -> io::Result<()> {
    let at = eyes.places.files.ksm();
    let pages = eyes.config.profile.values().share_pages.to_string();
    may_set(dir, at.join("pages_to_scan"), &pages, why)?;
    may_set(dir, at.join("sleep_millisecs"), SHARE_SLEEP, why)?;
    set(dir, &at.join("run"), "1", why)
}

fn compress(eyes: &Eyes, dir: &mut RunDir, why: &str) -> io::Result<()> {
    let at = eyes.places.files.zswap();
    let compressor = at.join("compressor");
    for name in COMPRESSORS {
        may_set(dir, compressor.clone(), name, why)?;
        if word(&compressor).is_ok_and(|now| now == name) {
            break;
        }
    }
    let percent = eyes.config.profile.values().zip_max_percent.to_string();
    may_set(dir, at.join("max_pool_percent"), &percent, why)?;
    // Pages that are not wanted leave the pool for swap before it is full.
    may_set(dir, at.join("shrinker_enabled"), "Y", why)?;
    set(dir, &at.join("enabled"), "Y", why)
}

fn pid(eyes: &Eyes, guest: &str) -> io::Result<u32> {
    let gone = || io::Error::new(io::ErrorKind::NotFound, format!("guest {guest} is gone"));
    let known = eyes.guests.known.get(guest).ok_or_else(gone)?;
    match &known.way {
        Way::Qmp(_) => known.qmp.as_ref().and_then(|q| q.pid),
        Way::Libvirt => libvirt::pid(guest),
    }
    .ok_or_else(gone)
}

/// Where a guest has a control group of its own (version 2) the kernel picks its coldest pages; else they are taken in order, each time
/// from where it stopped.
fn page_out(eyes: &mut Eyes, pid: u32, bytes: u64) -> io::Result<()> {
    let group = crate::kernel::group_of(&eyes.places.files, pid);
    let alone = group.filter(|dir| {
        let procs = std::fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        procs.lines().all(|l| l.trim() == pid.to_string())
    });
    if let Some(dir) = alone
        && std::fs::write(dir.join("memory.reclaim"), bytes.to_string()).is_ok()
    {
        return Ok(());
    }
    let there = eyes.out_to.get(&pid).copied().unwrap_or(0);
    let (_, stopped) = pages::out(pid, bytes, there)?;
    eyes.out_to.insert(pid, stopped);
    Ok(())
}

fn balloon(
    eyes: &mut Eyes,
    dir: &mut RunDir,
    guest: &str,
    from: u64,
    to: u64,
    why: &str,
) -> io::Result<()> {
    let pid = pid(eyes, guest).ok();
    let gone = || io::Error::new(io::ErrorKind::NotFound, format!("guest {guest} is gone"));
    let known = eyes.guests.known.get_mut(guest).ok_or_else(gone)?;
    let qmp = match &known.way {
        Way::Qmp(path) => Some(path.clone()),
        Way::Libvirt => None,
    };
    let target = Target::Balloon {
        guest: guest.to_owned(),
        qmp: qmp.clone(),
        pid,
    };
    dir.about_to(&target, &from.to_string(), &to.to_string(), why)?;
    match qmp {
        Some(path) => known.connected(&path)?.set_balloon(to),
        None => libvirt::set_balloon(guest, to),
    }
}

/// Has guests that are never asked for their statistics asked. Those of libvirt are libvirt's.
pub fn have_them_tell(eyes: &mut Eyes, dir: &mut RunDir) -> Vec<(String, io::Error)> {
    let mut failed = Vec::new();
    for (name, known) in &mut eyes.guests.known {
        let (Way::Qmp(path), Some(qmp)) = (&known.way, &mut known.qmp) else {
            continue;
        };
        let never = known.told.as_ref().and_then(|t| t.polling) == Some(0);
        if !never {
            continue;
        }
        let target = Target::Polling {
            guest: name.clone(),
            qmp: path.clone(),
            pid: qmp.pid,
        };
        let why = "to know when it is short";
        let done = dir
            .about_to(&target, "0", &POLLING.to_string(), why)
            .and_then(|()| qmp.set_polling(POLLING));
        if let Err(e) = done {
            failed.push((name.clone(), e));
        }
    }
    failed
}

/// What became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undone {
    /// It is as before.
    Back,
    /// Somebody else has set it since, or it is gone: it is left alone.
    Left,
}

/// Sets one change back. `open` has connections that are there already: a socket takes one at a time.
pub fn undo(note: &Note, open: &mut dyn FnMut(&Path) -> Option<Qmp>) -> io::Result<Undone> {
    let number = || note.before.parse::<u64>().map_err(io::Error::other);
    match &note.target {
        Target::File(path) => {
            let now = match word(path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Undone::Left),
                now => now?,
            };
            if now == note.before {
                return Ok(Undone::Back);
            }
            if !note.is_ours(&now) {
                return Ok(Undone::Left);
            }
            std::fs::write(path, &note.before)?;
            Ok(Undone::Back)
        }
        Target::Balloon {
            guest, qmp: None, ..
        } => {
            if !libvirt::domains()?.contains(guest) {
                return Ok(Undone::Left);
            }
            libvirt::set_balloon(guest, number()?)?;
            Ok(Undone::Back)
        }
        Target::Balloon {
            qmp: Some(path),
            pid,
            ..
        } => with(path, *pid, open, &mut |qmp| qmp.set_balloon(number()?)),
        Target::Polling { qmp: path, pid, .. } => {
            with(path, *pid, open, &mut |qmp| qmp.set_polling(number()?))
        }
    }
}

fn with(
    path: &Path,
    pid: Option<u32>,
    open: &mut dyn FnMut(&Path) -> Option<Qmp>,
    act: &mut dyn FnMut(&mut Qmp) -> io::Result<()>,
) -> io::Result<Undone> {
    let mut qmp = match open(path) {
        Some(qmp) => qmp,
        None => match Qmp::open(path) {
            // Nobody listens: the guest has ended.
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                return Ok(Undone::Left);
            }
            opened => opened?,
        },
    };
    if pid.is_some() && qmp.pid != pid {
        return Ok(Undone::Left);
    }
    act(&mut qmp)?;
    Ok(Undone::Back)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Files;
    use crate::look::Places;
    use hearth_memory::MemoryConfig;

    #[test]
    fn switches_are_set_noted_and_set_back() {
        let root = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let get = |name: &str| std::fs::read_to_string(root.path().join(name)).unwrap();
        put("sys/kernel/mm/ksm/run", "0\n");
        put("sys/kernel/mm/ksm/pages_to_scan", "100\n");
        put("sys/module/zswap/parameters/enabled", "N\n");
        put("sys/module/zswap/parameters/compressor", "lzo\n");
        put("sys/module/zswap/parameters/max_pool_percent", "20\n");
        let places = Places {
            files: Files {
                proc: root.path().join("proc"),
                sys: root.path().join("sys"),
            },
        };
        let mut eyes = Eyes::new(MemoryConfig::default(), places);
        let mut dir = RunDir::claim(&root.path().join("run"), "b").unwrap();
        act(&mut eyes, &mut dir, &Step::Share, "w").unwrap();
        act(&mut eyes, &mut dir, &Step::Compress, "w").unwrap();
        assert_eq!(get("sys/kernel/mm/ksm/run"), "1");
        assert_eq!(get("sys/kernel/mm/ksm/pages_to_scan"), "500");
        assert_eq!(get("sys/module/zswap/parameters/enabled"), "Y");
        assert_eq!(get("sys/module/zswap/parameters/compressor"), "lz4");
        // Somebody else's hand.
        put("sys/kernel/mm/ksm/pages_to_scan", "700\n");
        drop(dir);
        let dir = RunDir::claim(&root.path().join("run"), "b").unwrap();
        let outcomes: Vec<Undone> = dir
            .to_undo()
            .iter()
            .map(|note| undo(note, &mut |_| None).unwrap())
            .collect();
        assert_eq!(
            outcomes.iter().filter(|u| **u == Undone::Left).count(),
            1,
            "{outcomes:?}"
        );
        assert_eq!(get("sys/kernel/mm/ksm/run"), "0");
        assert_eq!(get("sys/kernel/mm/ksm/pages_to_scan"), "700\n");
        assert_eq!(get("sys/module/zswap/parameters/enabled"), "N");
        assert_eq!(get("sys/module/zswap/parameters/compressor"), "lzo");
        // A guest that is gone cannot be set back, and need not be.
        let gone = Note {
            target: Target::Balloon {
                guest: "g".into(),
                qmp: Some(root.path().join("none")),
                pid: None,
            },
            before: "1".into(),
            set: vec!["0".into()],
            why: String::new(),
        };
        assert_eq!(undo(&gone, &mut |_| None).unwrap(), Undone::Left);
    }
}
