//! Block devices, by way of a loop device; where this user may not make one, there is nothing
//! to test and the test says so.

use hearth_io::{BLOCK, BlockFile, OpenError, OpenMode};
use std::process::Command;

struct Loop(String);

impl Loop {
    fn new(file: &std::path::Path) -> Option<Loop> {
        let out = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file)
            .output()
            .ok()?;
        let name = String::from_utf8(out.stdout).ok()?.trim().to_owned();
        (out.status.success() && !name.is_empty()).then_some(Loop(name))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_block_device_reads_writes_zeroes_and_discards() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("backing");
    let size = 256 * BLOCK + 512;
    drop(BlockFile::create_sized(&path, size).unwrap());
    let Some(device) = Loop::new(&path) else {
        eprintln!("no loop devices here: block devices are not tested");
        return;
    };
    let disk = BlockFile::open(&device.0, OpenMode::default()).unwrap();
    assert!(disk.is_device() && disk.is_direct());
    assert_eq!(disk.size(), size);
    assert!(matches!(
        BlockFile::open(&device.0, OpenMode::default()),
        Err(OpenError::InUse(_))
    ));

    let mut model: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
    disk.write_at(0, &model).unwrap();
    for (offset, len, punch) in [
        (0, 8 * BLOCK, true),
        (16 * BLOCK, BLOCK, false),
        (32 * BLOCK + 7, 9000, true),
    ] {
        disk.write_zeroes(offset, len, punch).unwrap();
        model[offset as usize..(offset + len) as usize].fill(0);
    }
    disk.discard(128 * BLOCK + 1, 64 * BLOCK).unwrap();
    disk.flush().unwrap();
    let mut back = vec![1; size as usize];
    disk.read_at(0, &mut back).unwrap();
    let (from, to) = (128 * BLOCK as usize, 193 * BLOCK as usize);
    assert!(back[..from] == model[..from] && back[to..] == model[to..]);
    assert_eq!(back[from], model[from], "before the first whole block");
    assert_eq!(disk.extents(0, size).unwrap().len(), 1);
    assert!(disk.identity().unwrap().dev != 0);

    drop(disk);
    BlockFile::open(&device.0, OpenMode::default()).unwrap();
}
