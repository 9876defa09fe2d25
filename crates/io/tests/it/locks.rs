//! Who has a file, a device, or a stretch of either, and for how long.

use hearth_io::beneath::beneath;
use hearth_io::{BLOCK, BlockFile, InUse, OpenError, OpenMode};
use std::path::Path;
use std::process::Command;

const READ: OpenMode = OpenMode {
    read_only: true,
    unlocked: false,
};
const LOOK: OpenMode = OpenMode {
    read_only: true,
    unlocked: true,
};

struct Loop(String);

impl Loop {
    fn new(file: &Path, more: &[&str]) -> Option<Loop> {
        let mut command = Command::new("losetup");
        let out = command.args(["--find", "--show"]).args(more).arg(file);
        let out = out.output().ok()?;
        let name = String::from_utf8(out.stdout).ok()?.trim().to_owned();
        let made = (out.status.success() && !name.is_empty()).then_some(Loop(name));
        if made.is_none() {
            eprintln!("no loop devices here: what lies beneath them is not tested");
        }
        made
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

fn file(dir: &tempfile::TempDir, blocks: u64) -> std::path::PathBuf {
    let path = dir.path().join("f");
    drop(BlockFile::create_sized(&path, blocks * BLOCK).unwrap());
    path
}

fn in_use(path: impl AsRef<Path>, mode: OpenMode) -> Box<InUse> {
    match BlockFile::open(path, mode) {
        Err(OpenError::InUse(found)) => found,
        other => panic!("{other:?}"),
    }
}

/// Who only looks opens and closes the very same file meanwhile; with the other kind of byte locks
/// that would end them.
#[test]
fn looking_takes_no_lock_away() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, 4);
    let held = BlockFile::open(&path, OpenMode::default()).unwrap();
    let look = BlockFile::open(&path, LOOK).unwrap();
    look.read_at(0, &mut [0; 100]).unwrap();
    drop(look);
    drop(std::fs::read(&path).unwrap());
    let words = in_use(&path, READ).to_string();
    let pid = format!("(pid {})", std::process::id());
    assert!(
        words.contains(&pid) && words.contains("f is in use"),
        "{words}"
    );
    drop(held);
    BlockFile::open(&path, OpenMode::default()).unwrap();
}

#[test]
fn a_loop_device_has_its_file_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, 512);
    let Some(whole) = Loop::new(&path, &[]) else {
        return;
    };
    assert!(
        beneath(whole.0.as_ref())
            .unwrap()
            .overlaps(&beneath(&path).unwrap())
    );
    let held = BlockFile::open(&whole.0, OpenMode::default()).unwrap();
    for mode in [READ, OpenMode::default()] {
        in_use(&path, mode);
    }
    drop(held);
    let held = BlockFile::open(&path, OpenMode::default()).unwrap();
    let found = in_use(&whole.0, OpenMode::default());
    assert_eq!(found.other, Some((path.canonicalize().unwrap(), true)));
    drop(held);
    // The file's old name is no help, and none is needed.
    let moved = dir.path().join("g");
    std::fs::rename(&path, &moved).unwrap();
    assert!(
        beneath(whole.0.as_ref())
            .unwrap()
            .overlaps(&beneath(&moved).unwrap())
    );
    // Readers share.
    let (_one, _two) = (
        BlockFile::open(&whole.0, READ).unwrap(),
        BlockFile::open(&moved, READ).unwrap(),
    );
}

/// Within one process the stretches are compared by who adds disks.
#[test]
fn stretches_of_one_file_share_its_lock() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, 512);
    let half = (256 * BLOCK).to_string();
    let low = Loop::new(&path, &["--sizelimit", &half]);
    let high = Loop::new(&path, &["--offset", &half]);
    let (Some(low), Some(high)) = (low, high) else {
        return;
    };
    let stretch = |device: &Loop| beneath(device.0.as_ref()).unwrap();
    assert!(!stretch(&low).overlaps(&stretch(&high)));
    // The first reads only: the second asks for more.
    let one = BlockFile::open(&low.0, READ).unwrap();
    let two = BlockFile::open(&high.0, OpenMode::default()).unwrap();
    drop(two);
    in_use(&path, OpenMode::default());
    drop(one);
    BlockFile::open(&path, OpenMode::default()).unwrap();
}
