//! Does what was decided, and sets it back.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use hearth_memory::config::ZIP_MAX_PERCENT;
use hearth_memory::{Note, Step, Target};

use crate::guests::{Guests, Known, Way};
use crate::line::{Answer, Line, once};
use crate::look::Eyes;
use crate::qmp::Qmp;
use crate::store::RunDir;
use crate::{libvirt, pages};

/// Compressors, the best that a kernel may have first: fast ones, for a page that is wanted must not wait.
const COMPRESSORS: [&str; 3] = ["lz4", "zstd", "lzo-rle"];
/// How often guests are asked for their statistics while a controller runs, in seconds.
const POLLING: u64 = 1;

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

/// Makes one step; what a guest has to do for it is waited for until `end`.
pub fn act(
    eyes: &mut Eyes,
    dir: &mut RunDir,
    step: &Step,
    why: &str,
    end: Instant,
) -> io::Result<()> {
    match step {
        Step::Compress => compress(eyes, dir, why),
        Step::StopCompress => set(dir, &eyes.places.files.zswap().join("enabled"), "N", why),
        Step::Balloon { guest, from, to } => balloon(eyes, dir, guest, *from, *to, why, end),
        Step::PageOut { guest, bytes } => {
            let pid = pid(eyes, guest)?;
            page_out(eyes, pid, *bytes)
        }
        Step::ReadBack { guest, bytes } => pages::back(pid(eyes, guest)?, *bytes).map(drop),
    }
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
    let percent = ZIP_MAX_PERCENT.to_string();
    may_set(dir, at.join("max_pool_percent"), &percent, why)?;
    // Pages that are not wanted leave the pool for swap before it is full.
    may_set(dir, at.join("shrinker_enabled"), "Y", why)?;
    set(dir, &at.join("enabled"), "Y", why)
}

fn known<'a>(eyes: &'a Eyes, guest: &str) -> io::Result<&'a Known> {
    let gone = || io::Error::new(io::ErrorKind::NotFound, format!("guest {guest} is gone"));
    eyes.guests.known.get(guest).ok_or_else(gone)
}

fn pid(eyes: &Eyes, guest: &str) -> io::Result<u32> {
    let pid = known(eyes, guest)?.told().and_then(|told| told.pid);
    pid.ok_or_else(|| io::Error::other(format!("the process of guest {guest} is not known")))
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
    eyes: &Eyes,
    dir: &mut RunDir,
    guest: &str,
    from: u64,
    to: u64,
    why: &str,
    end: Instant,
) -> io::Result<()> {
    let known = known(eyes, guest)?;
    let target = Target::Balloon {
        guest: guest.to_owned(),
        qmp: match &known.way {
            Way::Qmp(line) => Some(line.path.clone()),
            Way::Libvirt => None,
        },
        pid: pid(eyes, guest).ok(),
    };
    dir.about_to(&target, &from.to_string(), &to.to_string(), why)?;
    let answer = match &known.way {
        Way::Qmp(line) => line.ask(move |qmp| qmp.set_balloon(to))?,
        Way::Libvirt => {
            let guest = guest.to_owned();
            once(move || libvirt::set_balloon(&guest, to))?
        }
    };
    answer.needed_by(end)
}

/// Has guests that are never asked for their statistics asked. Those of libvirt are libvirt's.
pub fn have_them_tell(eyes: &Eyes, dir: &mut RunDir, end: Instant) -> Vec<(String, io::Error)> {
    let mut failed = Vec::new();
    for (name, known) in &eyes.guests.known {
        let (Way::Qmp(line), Some(told)) = (&known.way, known.told()) else {
            continue;
        };
        if told.polling != Some(0) {
            continue;
        }
        let target = Target::Polling {
            guest: name.clone(),
            qmp: line.path.clone(),
            pid: told.pid,
        };
        let why = "to know when it is short";
        let done = dir
            .about_to(&target, "0", &POLLING.to_string(), why)
            .and_then(|()| line.ask(|qmp| qmp.set_polling(POLLING)))
            .and_then(|answer| answer.needed_by(end));
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

/// Begins to set one change back, over a connection to `guests` that is there already: a socket
/// takes one at a time.
pub fn undo(note: &Note, guests: Option<&Guests>) -> io::Result<Answer<Undone>> {
    let before = note.before.clone();
    let number = move || before.parse::<u64>().map_err(io::Error::other);
    match &note.target {
        Target::File(_) => {
            let note = note.clone();
            once(move || undo_file(&note))
        }
        Target::Balloon {
            guest,
            qmp: None,
            pid,
        } => {
            let (guest, pid) = (guest.clone(), *pid);
            once(move || {
                // Another of this name was never changed.
                if pid.is_some() && libvirt::pid(&guest) != pid {
                    return Ok(Undone::Left);
                }
                libvirt::set_balloon(&guest, number()?)?;
                Ok(Undone::Back)
            })
        }
        Target::Balloon {
            guest,
            qmp: Some(path),
            pid,
        } => with(path, guest, *pid, guests, move |qmp| {
            qmp.set_balloon(number()?)
        }),
        Target::Polling {
            guest,
            qmp: path,
            pid,
        } => with(path, guest, *pid, guests, move |qmp| {
            qmp.set_polling(number()?)
        }),
    }
}

fn undo_file(note: &Note) -> io::Result<Undone> {
    let Target::File(path) = &note.target else {
        return Ok(Undone::Left);
    };
    let now = word(path)?;
    if now == note.before {
        return Ok(Undone::Back);
    }
    if !note.is_ours(&now) {
        return Ok(Undone::Left);
    }
    std::fs::write(path, &note.before)?;
    Ok(Undone::Back)
}

fn with(
    path: &Path,
    guest: &str,
    pid: Option<u32>,
    guests: Option<&Guests>,
    act: impl FnOnce(&mut Qmp) -> io::Result<()> + Send + 'static,
) -> io::Result<Answer<Undone>> {
    let act = move |qmp: &mut Qmp| {
        if pid.is_some() && qmp.pid != pid {
            return Ok(Undone::Left);
        }
        act(qmp)?;
        Ok(Undone::Back)
    };
    let known = guests.and_then(|guests| guests.known.get(guest));
    match known.map(|known| &known.way) {
        Some(Way::Qmp(line)) if line.path == path => line.ask(act),
        _ => Line::new(path)?.ask(act),
    }
}

/// What was there to be set back is gone, or nobody listens any more: the guest has ended.
pub fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, NotFound};
    matches!(error.kind(), NotFound | ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Files;
    use crate::line::PATIENCE;
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
        put("sys/module/zswap/parameters/enabled", "N\n");
        put("sys/module/zswap/parameters/compressor", "lzo\n");
        put("sys/module/zswap/parameters/max_pool_percent", "10\n");
        let places = Places {
            files: Files {
                proc: root.path().join("proc"),
                sys: root.path().join("sys"),
            },
        };
        let mut eyes = Eyes::new(MemoryConfig::default(), places);
        let mut dir = RunDir::claim(&root.path().join("run"), "b").unwrap();
        let end = Instant::now() + 10 * PATIENCE;
        act(&mut eyes, &mut dir, &Step::Compress, "w", end).unwrap();
        assert_eq!(get("sys/module/zswap/parameters/enabled"), "Y");
        assert_eq!(get("sys/module/zswap/parameters/compressor"), "lz4");
        assert_eq!(get("sys/module/zswap/parameters/max_pool_percent"), "20");
        act(&mut eyes, &mut dir, &Step::StopCompress, "w", end).unwrap();
        assert_eq!(get("sys/module/zswap/parameters/enabled"), "N");
        act(&mut eyes, &mut dir, &Step::Compress, "w", end).unwrap();
        // Somebody else's hand.
        put("sys/module/zswap/parameters/max_pool_percent", "30\n");
        drop(dir);
        let dir = RunDir::claim(&root.path().join("run"), "b").unwrap();
        let undone = |note: &Note| undo(note, None).unwrap().needed_by(end);
        let outcomes: Vec<Undone> = dir.to_undo().iter().map(|n| undone(n).unwrap()).collect();
        assert_eq!(
            outcomes.iter().filter(|u| **u == Undone::Left).count(),
            1,
            "{outcomes:?}"
        );
        assert_eq!(get("sys/module/zswap/parameters/max_pool_percent"), "30\n");
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
        assert!(is_gone(&undone(&gone).unwrap_err()));
    }
}
