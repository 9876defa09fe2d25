use super::*;

fn temp(size: u64) -> (tempfile::TempDir, BlockFile) {
    let dir = tempfile::tempdir().unwrap();
    let file = BlockFile::create_sized(dir.path().join("f"), size).unwrap();
    (dir, file)
}

#[test]
fn odd_size_reads_back_and_never_grows() {
    let size = 5 * BLOCK + 1234;
    let (dir, file) = temp(size);
    let data: Vec<u8> = (0..size).map(|i| (i * 7 % 251) as u8).collect();
    file.write_at(0, &data).unwrap();
    file.flush().unwrap();
    let mut back = vec![0; size as usize];
    file.read_at(0, &mut back).unwrap();
    assert_eq!(back, data);
    assert_eq!(std::fs::read(dir.path().join("f")).unwrap(), data);
    assert_eq!(
        file.write_at(size - 1, &[1, 2]).unwrap_err().kind(),
        io::ErrorKind::UnexpectedEof
    );
    assert_eq!(
        file.write_at(u64::MAX, &[1, 2]).unwrap_err().kind(),
        io::ErrorKind::UnexpectedEof
    );
    assert_eq!(std::fs::metadata(dir.path().join("f")).unwrap().len(), size);
}

#[test]
fn second_opener_is_refused() {
    let (dir, file) = temp(BLOCK);
    let path = dir.path().join("f");
    assert!(matches!(
        BlockFile::open(&path, OpenMode::default()),
        Err(OpenError::InUse(_))
    ));
    drop(file);
    let readers = OpenMode {
        read_only: true,
        ..OpenMode::default()
    };
    let one = BlockFile::open(&path, readers).unwrap();
    let two = BlockFile::open(&path, readers).unwrap();
    assert!(one.write_at(0, &[0; 4096]).is_err());
    assert!(matches!(
        BlockFile::open(&path, OpenMode::default()),
        Err(OpenError::InUse(_))
    ));
    drop((one, two));
    BlockFile::open(&path, OpenMode::default()).unwrap();
}

#[test]
fn zeroes_discard_and_extents() {
    let size = 64 * BLOCK + 100;
    let (_dir, file) = temp(size);
    file.write_at(0, &vec![7; size as usize]).unwrap();
    file.flush().unwrap();
    file.write_zeroes(8 * BLOCK, 8 * BLOCK, true).unwrap();
    file.write_zeroes(32 * BLOCK + 3, BLOCK, false).unwrap();
    file.write_zeros_by_hand(size - 150, 150).unwrap();
    let mut back = vec![0; size as usize];
    file.read_at(0, &mut back).unwrap();
    for (i, byte) in back.iter().enumerate() {
        let i = i as u64;
        let zero = (8 * BLOCK..16 * BLOCK).contains(&i)
            || (32 * BLOCK + 3..33 * BLOCK + 3).contains(&i)
            || i >= size - 150;
        assert_eq!(*byte, if zero { 0 } else { 7 }, "byte {i}");
    }
    file.discard(0, size).unwrap();
    let extents = file.extents(0, size).unwrap();
    assert_eq!(extents.iter().map(|e| e.len).sum::<u64>(), size);
}

#[test]
fn refuses_what_is_no_block_file() {
    assert!(matches!(
        BlockFile::open("/dev/null", OpenMode::default()),
        Err(OpenError::NotBlock(_))
    ));
    assert!(matches!(
        BlockFile::open("/nowhere/at/all", OpenMode::default()),
        Err(OpenError::Open { .. })
    ));
}

#[test]
fn size_follows_the_file() {
    let (dir, file) = temp(4 * BLOCK);
    let path = dir.path().join("f");
    std::fs::OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(6 * BLOCK + 1)
        .unwrap();
    assert_eq!(file.size(), 4 * BLOCK);
    assert_eq!(file.refresh_size().unwrap(), 6 * BLOCK + 1);
    assert!(!file.fits_direct(6 * BLOCK, 512));
    assert!(file.fits_direct(0, 6 * BLOCK));
    assert_eq!(file.identity().unwrap().size, 6 * BLOCK + 1);
}

#[test]
fn file_system_without_blocks_does_not_count_as_full() {
    // procfs has none, like FUSE without statfs.
    let silent = std::fs::File::open("/proc/self/status").unwrap();
    assert_eq!(sys::file_system_room(&silent).unwrap().1, u64::MAX);
    let (_dir, file) = temp(1 << 20);
    let free = file.space().unwrap().unwrap().free;
    assert!(free < u64::MAX, "{free}");
    assert_eq!(sys::free_bytes(10, 0, 4096), 0);
}

#[test]
fn only_what_this_host_knows_is_asked_for_holes() {
    let (_dir, file) = temp(1 << 20);
    // Wherever the test runs.
    let magic = sys::file_system(&file.direct).unwrap();
    assert_eq!(file.shows_holes, has_own_map(magic));
    const NFS: u32 = 0x6969;
    assert!(!has_own_map(FUSE) && !has_own_map(NFS));
    let stranger = BlockFile {
        shows_holes: false,
        ..file
    };
    let all = [Extent {
        offset: 4096,
        len: 8192,
        data: true,
    }];
    stranger.discard(0, 1 << 20).unwrap();
    assert_eq!(stranger.extents(4096, 8192).unwrap(), all);
}

#[test]
fn udev_that_looks_at_a_disk_is_waited_for() {
    use std::os::unix::process::CommandExt;
    let (dir, file) = temp(BLOCK);
    drop(file);
    let path = dir.path().join("f");
    let held = File::open(&path).unwrap();
    assert!(crate::lock::take_whole(&held, Use::Read).unwrap());
    // It has the lock for longer than anybody else would be waited for, and shorter than udev is.
    let mut udev = std::process::Command::new("sleep")
        .arg0("(udev-worker)")
        .arg("1")
        .stdin(held)
        .spawn()
        .unwrap();
    let opened = BlockFile::open(&path, OpenMode::default());
    udev.wait().unwrap();
    opened.unwrap();
}
