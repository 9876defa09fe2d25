//! Two file systems of their own, of which one fails as disks do: it answers everything with errors, or does not answer at all.
//!
//! The file systems lie in memory, so that none but the failing one is ever slow.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;

use hearth_io::OpenError;
use rustix::fs::FallocateFlags;

use super::*;
use crate::body::claim;

/// `EXT4_IOC_SHUTDOWN`, and "without writing the log": as if the disk were gone.
const SHUTDOWN: libc::c_ulong = 0x8004_587d;
const NO_LOG: u32 = 2;
/// `FS_IOC_FIEMAP`: where a file lies.
const FIEMAP: libc::c_ulong = 0xc020_660b;
/// Of the file systems here.
const BLOCK: u64 = 4096;
/// How long a tree may take here.
const PATIENCE: Duration = Duration::from_secs(3);

fn run(program: &str, args: &[&str]) -> Result<(), String> {
    let done = Command::new(program).args(args).output();
    let done = done.map_err(|e| format!("{program}: {e}"))?;
    match done.status.success() {
        true => Ok(()),
        false => Err(format!(
            "{program}: {}",
            String::from_utf8_lossy(&done.stderr)
        )),
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// `struct fiemap`, with extents as words: where in the file, where on the device, how long, and more.
#[repr(C)]
struct FileMap {
    start: u64,
    len: u64,
    flags: u32,
    mapped: u32,
    room: u32,
    unused: u32,
    extents: [[u64; 7]; 64],
}

/// A directory with a file system of its own.
struct Mount {
    image: PathBuf,
    at: PathBuf,
}

impl Mount {
    fn new(image: PathBuf, at: PathBuf, how: &[&str]) -> Result<Mount, String> {
        let made = fs::File::create(&image).and_then(|file| file.set_len(48 << 20));
        made.map_err(|e| e.to_string())?;
        run("mkfs.ext4", &[&["-q", "-F", text(&image)], how].concat())?;
        let mount = Mount { image, at };
        mount.bring_back()?;
        Ok(mount)
    }

    fn bring_back(&self) -> Result<(), String> {
        run("mount", &["-o", "loop", text(&self.image), text(&self.at)])
    }

    /// From now on everything fails.
    fn break_down(&self) {
        let root = fs::File::open(&self.at).unwrap();
        let how = NO_LOG;
        // SAFETY: the call reads a number of 32 bits from where `how` lies, which lives on.
        let done = unsafe { libc::ioctl(root.as_raw_fd(), SHUTDOWN as _, &raw const how) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }

    /// From now on who changes something waits.
    fn freeze(&self) {
        run("fsfreeze", &["-f", text(&self.at)]).unwrap();
    }

    fn thaw(&self) {
        run("fsfreeze", &["-u", text(&self.at)]).unwrap();
    }

    /// The last blocks of a file cannot be read from now on, until they are written: where they lie, the device beneath has an end,
    /// which writing moves. Nothing else lies behind them.
    fn spoil(&self, name: &str, blocks: u64) {
        let file = fs::File::open(self.at.join(name)).unwrap();
        file.sync_all().unwrap();
        let mut extents = FileMap {
            start: 0,
            len: u64::MAX,
            flags: 0,
            mapped: 0,
            room: 64,
            unused: 0,
            extents: [[0; 7]; 64],
        };
        // SAFETY: the call reads and writes the structure, with the room for extents that it names.
        let done = unsafe { libc::ioctl(file.as_raw_fd(), FIEMAP as _, &raw mut extents) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
        let last = extents.extents[extents.mapped as usize - 1];
        let end = last[1] + last[2];
        let image = fs::OpenOptions::new().write(true).open(&self.image);
        image.unwrap().set_len(end - blocks * BLOCK).unwrap();
        self.forget(name);
        let read = fs::read(self.at.join(name));
        assert!(read.is_err(), "it can still be read");
    }

    /// What the kernel keeps of a file's content.
    fn forget(&self, name: &str) {
        let file = fs::File::open(self.at.join(name)).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Whichever of these is needed; after a failed test nothing shall stay mounted.
        let _ = run("fsfreeze", &["-u", text(&self.at)]);
        let _ = run("umount", &["-l", text(&self.at)]);
    }
}

/// Two trees on file systems of their own, if this host lets us.
fn mounted(how: &[&str]) -> Option<([Mount; 2], Place2)> {
    let place = tempfile::tempdir_in("/dev/shm").ok()?;
    let mount = |name: &str| {
        let at = place.path().join(name);
        fs::create_dir(&at).map_err(|e| e.to_string())?;
        Mount::new(place.path().join(format!("{name}.img")), at, how)
    };
    let both = mount("a").and_then(|a| Ok([a, mount("b")?]));
    let mounts = match both {
        Ok(mounts) => mounts,
        Err(e) => {
            eprintln!("skipped: {e}");
            return None;
        }
    };
    let place = Place2 {
        place,
        bell: Arc::default(),
    };
    prepare(&place.both(), 77).unwrap();
    Some((mounts, place))
}

/// Everything that clients do, with one file after another.
fn work(twin: &Twin, round: u8) {
    let (root, who) = (twin.root(), Who::root());
    let name = |kind: &str| format!("{kind}-{round}");
    let dir = directory(twin, &root, &name("dir"));
    let file = make(twin, &dir, "disk.img");
    write(twin, &file, 0, &[round; 70_000]);
    write(twin, &file, 16 << 20, &[round; 5000]);
    let gone = make(twin, &root, "gone");
    write(twin, &gone, 0, b"x");
    twin.rename(&who, (&dir, b"disk.img"), (&root, name("disk").as_bytes()))
        .0
        .unwrap();
    twin.remove(&who, &root, b"gone", false).outcome.unwrap();
    assert_eq!(twin.attributes(&file).unwrap().size, (16 << 20) + 5000);
}

/// A tree that was out has what the other has, the work of this round included.
fn is_whole_again(place: &Place2, twin: &Twin, side: usize, round: u8) {
    place.wait_current(twin);
    assert_eq!(place.seen(0), place.seen(1));
    let disk = format!("disk-{round}");
    assert!(place.seen(side).contains_key(Path::new(&disk)));
}

#[test]
fn one_that_answers_with_errors_is_out_and_comes_back() {
    let Some((mounts, place)) = mounted(&[]) else {
        return;
    };
    let twin = place.open();
    place.wait_current(&twin);
    work(&twin, 1);
    // In use all the time, locked and watched.
    let disk = make(&twin, &twin.root(), "used.img");
    let used = twin.open_regular(&disk).unwrap();
    used.claim().unwrap();
    let opened = Arc::new(AtomicU64::new(0));
    let count = opened.clone();
    used.when_opened(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
    });
    used.set_len(1 << 20).unwrap();
    for side in [1, 0] {
        mounts[side].break_down();
        work(&twin, 2 + side as u8);
        place.wait_out(&twin, side);
        work(&twin, 4 + side as u8);
        used.write(4096, vec![6 + side as u8; 8192]).unwrap();
        let before = opened.load(Ordering::SeqCst);
        let other = twin.report()[1 - side].clone();
        assert_eq!(other.state, "current", "{other:?}");
        // Nothing of it is in use any more: the disk can be exchanged.
        place.bell.until("it can be unmounted", || {
            run("umount", &[text(&mounts[side].at)]).is_ok()
        });
        // What is beneath is no tree.
        assert!(fs::read_dir(&mounts[side].at).unwrap().next().is_none());
        mounts[side].bring_back().unwrap();
        is_whole_again(&place, &twin, side, 4 + side as u8);
        used.write(0, vec![8 + side as u8; 4096]).unwrap();
        assert_eq!(opened.load(Ordering::SeqCst), before + 1);
        let name = place.both()[side].join("used.img");
        let elsewhere = fs::OpenOptions::new().read(true).write(true).open(&name);
        let user = claim(&elsewhere.unwrap());
        assert!(matches!(user, Err(OpenError::InUse(_))), "it is not locked");
        assert_eq!(place.seen(0), place.seen(1));
    }
    drop((used, twin));
    drop(mounts);
}

#[test]
fn one_that_does_not_answer_is_out_after_its_time_and_comes_back() {
    let Some((mounts, place)) = mounted(&[]) else {
        return;
    };
    let twin = place.open_patient("state", PATIENCE).unwrap();
    place.wait_current(&twin);
    work(&twin, 1);
    for side in [1, 0] {
        mounts[side].freeze();
        // Clients wait for as long as it may take, and go on.
        work(&twin, 2 + side as u8);
        let report = twin.report();
        assert_eq!(report[1 - side].state, "current", "{report:?}");
        assert_ne!(report[side].state, "current", "{report:?}");
        let why = report[side].why.clone().unwrap_or_default();
        assert!(why.contains("in time"), "{report:?}");
        work(&twin, 4 + side as u8);
        // What hung comes to its end, with what it was given then.
        mounts[side].thaw();
        is_whole_again(&place, &twin, side, 4 + side as u8);
    }
    drop(twin);
    drop(mounts);
}

/// A file whose end does not fill its last block, in two parts of a tree.
const LEN: usize = (18 << 20) + 5000;

#[test]
fn a_place_that_cannot_be_read_is_written_anew_and_its_tree_goes_out_once() {
    // Without a log, which would be written behind the end that the device gets.
    let Some((mounts, place)) = mounted(&["-b", "4096", "-O", "^has_journal"]) else {
        return;
    };
    let twin = place.open();
    place.wait_current(&twin);
    let mut state = 9_u32;
    let content: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(LEN)
    .collect();
    let disk = make(&twin, &twin.root(), "disk.img");
    write(&twin, &disk, 0, &content);
    twin.settle();
    let lost = || place.bell.lost.load(Ordering::SeqCst);
    let before = lost();
    mounts[0].spoil("disk.img", 16);

    // Whoever reads it is answered by the other tree, now and later.
    let end = LEN - 6000..LEN;
    let file = twin.open_regular(&disk).unwrap();
    assert!(file.read(end.start as u64, 6000).unwrap() == content[end.clone()]);
    assert_eq!(lost(), before + 1);
    place.wait_current(&twin);
    mounts[0].forget("disk.img");
    assert!(fs::read(mounts[0].at.join("disk.img")).unwrap() == content);
    assert!(file.read(end.start as u64, 6000).unwrap() == content[end]);
    assert!(file.read(0, LEN).unwrap() == content);
    assert_eq!(lost(), before + 1);
    let report = twin.report();
    assert!(
        report.iter().all(|tree| tree.state == "current"),
        "{report:?}"
    );
    drop((file, twin));
    drop(mounts);
}

/// Takes the room of a file system, but for a little. What takes it has no name, and gives it back when it is closed.
fn fill(at: &Path) -> fs::File {
    let path = at.join("filler");
    let filler = fs::File::create_new(&path).unwrap();
    fs::remove_file(path).unwrap();
    let free = rustix::fs::fstatvfs(&filler).unwrap();
    let len = free.f_bfree * free.f_frsize - (1 << 20);
    rustix::fs::fallocate(&filler, FallocateFlags::empty(), 0, len).unwrap();
    filler
}

#[test]
fn the_fuller_one_says_what_room_there_is_and_either_may_be_full() {
    let Some((mounts, place)) = mounted(&["-b", "4096"]) else {
        return;
    };
    let twin = place.open();
    place.wait_current(&twin);
    let disk = make(&twin, &twin.root(), "disk.img");
    write(&twin, &disk, 0, &[1; 5000]);
    let file = twin.open_regular(&disk).unwrap();
    let room = || twin.room().unwrap().bytes_free;
    let empty = room();
    for side in [1, 0] {
        let filler = fill(&mounts[side].at);
        assert!(room() <= 2 << 20 && empty > 16 << 20, "{}", room());
        // Where nothing has its place yet.
        let at = (2 - side as u64) << 23;
        let done = file.write(at, vec![2 + side as u8; 4 << 20]);
        // The first one's is the client's own; of the second, which is full alone, clients are told nothing.
        assert_eq!(done.is_err(), side == 0, "{done:?}");
        if let Err(e) = done {
            assert_eq!(e.raw_os_error(), Some(libc::ENOSPC));
            assert_eq!(twin.report()[side].state, "current");
        } else {
            assert_eq!(twin.report()[1 - side].state, "current");
        }
        drop(filler);
        place.wait_current(&twin);
        assert!(place.seen(0) == place.seen(1));
        assert!(room() > 16 << 20);
    }
    drop((file, twin));
    drop(mounts);
}
