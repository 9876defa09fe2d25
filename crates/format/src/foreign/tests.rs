//! Crafted marks for every format, and real tools where the machine has them.

use super::*;
use proptest::prelude::*;
use std::process::Command;

fn look(image: &[u8]) -> Option<Found> {
    let mut read = |offset: u64, out: &mut [u8]| {
        assert_eq!(offset % 4096, 0);
        out.copy_from_slice(&image[offset as usize..][..out.len()]);
        Ok(())
    };
    identify(&mut read, image.len() as u64).unwrap()
}

const SIZE: usize = 3 << 20;

fn with(marks: &[(usize, &[u8])]) -> Option<Found> {
    with_size(SIZE, marks)
}

fn with_size(size: usize, marks: &[(usize, &[u8])]) -> Option<Found> {
    let mut image = vec![0u8; size];
    for (offset, bytes) in marks {
        image[*offset..][..bytes.len()].copy_from_slice(bytes);
    }
    look(&image)
}

#[track_caller]
fn expect(what: &str, offset: usize, marks: &[(usize, &[u8])]) {
    assert_eq!(
        with(marks),
        Some(Found {
            what: what.to_owned(),
            offset: offset as u64
        })
    );
}

#[test]
fn every_fixed_mark_is_found_alone() {
    for mark in CONTAINERS.iter().chain(FILE_SYSTEMS) {
        expect(
            mark.what,
            mark.offset as usize,
            &[(mark.offset as usize, mark.magic)],
        );
    }
}

#[test]
fn blank_tiny_and_random_devices_hold_nothing() {
    for size in [0, 1, 511, 512, 4096, 65536, 1 << 20, SIZE] {
        assert_eq!(look(&vec![0u8; size]), None);
    }
    assert_eq!(look(&vec![0xA5u8; SIZE]), None);
}

#[test]
fn both_copies_of_a_pool_are_recognised() {
    expect("a Hearth pool", 0, &[(0, b"HEARTHSB")]);
    expect("a Hearth pool", 1 << 20, &[(1 << 20, b"HEARTHSB")]);
}

#[test]
fn ext_versions_are_told_apart() {
    let magic: (usize, &[u8]) = (1080, b"\x53\xef");
    expect("an ext2 file system", 1080, &[magic]);
    expect("an ext3 file system", 1080, &[magic, (1024 + 92, &[4])]);
    expect(
        "an ext4 file system",
        1080,
        &[magic, (1024 + 92, &[4]), (1024 + 96, &[0x42])],
    );
    expect(
        "an ext3/ext4 journal device",
        1080,
        &[magic, (1024 + 96, &[8])],
    );
}

#[test]
fn swap_of_every_page_size() {
    for page in SWAP_PAGES {
        let at = page as usize - 10;
        expect("Linux swap space", at, &[(at, b"SWAPSPACE2")]);
    }
}

#[test]
fn lvm_label_in_each_of_the_first_four_sectors() {
    for sector in 0..4 {
        let at = sector * 512;
        expect(
            "an LVM2 physical volume",
            at,
            &[(at, b"LABELONE"), (at + 24, b"LVM2 001")],
        );
    }
    assert_eq!(with(&[(2048, b"LABELONE"), (2048 + 24, b"LVM2 001")]), None);
}

#[test]
fn md_of_every_version() {
    let one = b"\xfc\x4e\x2b\xa9\x01\0\0\0";
    expect("a Linux RAID member (md 1.1)", 0, &[(0, one)]);
    expect("a Linux RAID member (md 1.2)", 4096, &[(4096, one)]);
    expect(
        "a Linux RAID member (md 1.0)",
        SIZE - 8192,
        &[(SIZE - 8192, one)],
    );
    expect(
        "a Linux RAID member (md 0.90)",
        SIZE - 65536,
        &[(SIZE - 65536, b"\xfc\x4e\x2b\xa9")],
    );
    expect(
        "a Linux RAID member (md 0.90)",
        SIZE - 65536,
        &[(SIZE - 65536, b"\xa9\x2b\x4e\xfc")],
    );
}

#[test]
fn md_hides_the_file_system_inside_it() {
    let one = b"\xfc\x4e\x2b\xa9\x01\0\0\0";
    let found = with(&[(0, b"XFSB"), (SIZE - 8192, one)]).unwrap();
    assert_eq!(found.what, "a Linux RAID member (md 1.0)");
}

#[test]
fn zfs_by_any_uberblock_of_any_label() {
    let label = 256 << 10;
    for start in [0, label, SIZE - 2 * label, SIZE - label] {
        let at = start + (128 << 10) + 5 * 1024;
        expect(
            "a ZFS pool member",
            at,
            &[(at, &0x00ba_b10cu64.to_le_bytes())],
        );
        expect(
            "a ZFS pool member",
            at,
            &[(at, &0x00ba_b10cu64.to_be_bytes())],
        );
    }
}

#[test]
fn marks_at_the_end() {
    expect(
        "a fixed VHD disk image",
        SIZE - 512,
        &[(SIZE - 512, b"conectix")],
    );
    expect(
        "an Intel RAID member",
        SIZE - 1024,
        &[(SIZE - 1024, b"Intel Raid ISM Cfg Sig. ")],
    );
    expect(
        "a DDF RAID member",
        SIZE - 512,
        &[(SIZE - 512, b"\xde\x11\xde\x11")],
    );
    for last in [0x6b, 0x6c, 0x6d] {
        expect(
            "a DRBD backing device",
            SIZE - 4096,
            &[(SIZE - 4096 + 60, &[0x83, 0x74, 0x02, last])],
        );
    }
    let odd = SIZE + 700;
    let found = with_size(odd, &[(SIZE - 4096 + 60, b"\x83\x74\x02\x6b")]).unwrap();
    assert_eq!(found.what, "a DRBD backing device");
}

#[test]
fn partition_tables() {
    let mut entry = [0u8; 16];
    (entry[4], entry[12]) = (0x83, 1);
    let boot: (usize, &[u8]) = (510, b"\x55\xaa");
    expect("an MBR partition table", 510, &[boot, (446, &entry)]);
    expect("a boot sector", 510, &[boot]);
    expect(
        "a GPT partition table",
        512,
        &[boot, (446, &entry), (512, b"EFI PART")],
    );
    expect("a GPT partition table", 4096, &[(4096, b"EFI PART")]);
    expect(
        "a backup GPT partition table",
        SIZE - 512,
        &[(SIZE - 512, b"EFI PART")],
    );
}

#[test]
fn fat_by_its_parameter_block() {
    let parameters = [
        (0usize, &b"\xeb\x3c\x90mkfs.fat"[..]),
        (11, b"\x00\x02\x04\x01\x00\x02"),
        (21, b"\xf8"),
        (510, b"\x55\xaa"),
    ];
    expect("a FAT file system", 0, &parameters);
}

#[test]
fn read_errors_come_through() {
    let error = identify(&mut |_, _| Err(io::Error::other("gone")), 1 << 30).unwrap_err();
    assert_eq!(error.to_string(), "gone");
}

/// Makes a file of 64 MiB, runs a real tool on it and looks. Machines without the tool skip.
fn real(tool: &str, args: &[&str], what: &str) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(64 << 20).unwrap();
    let mut command = Command::new(tool);
    let path = format!(
        "{}:/usr/sbin:/sbin",
        std::env::var("PATH").unwrap_or_default()
    );
    match command
        .env("PATH", path)
        .args(args)
        .arg(file.path())
        .output()
    {
        Err(_) => return,
        Ok(output) => assert!(output.status.success(), "{tool}: {output:?}"),
    }
    let image = std::fs::read(file.path()).unwrap();
    assert_eq!(look(&image).map(|found| found.what).as_deref(), Some(what));
}

#[test]
fn real_ext_file_systems() {
    real("mkfs.ext4", &["-q", "-F"], "an ext4 file system");
    real("mkfs.ext3", &["-q", "-F"], "an ext3 file system");
    real("mkfs.ext2", &["-q", "-F"], "an ext2 file system");
}

#[test]
fn real_swap() {
    real("mkswap", &[], "Linux swap space");
}

#[test]
fn real_disk_images() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let made = [
        ("qcow2", "a qcow2 disk image"),
        ("vhdx", "a VHDX disk image"),
        ("vmdk", "a VMDK disk image"),
    ];
    for (format, what) in made {
        let output = Command::new("qemu-img")
            .args(["create", "-q", "-f", format])
            .arg(&path)
            .arg("16M")
            .output();
        match output {
            Err(_) => return,
            Ok(output) => assert!(output.status.success(), "{output:?}"),
        }
        let image = std::fs::read(&path).unwrap();
        assert_eq!(look(&image).map(|found| found.what).as_deref(), Some(what));
    }
}

#[test]
fn real_btrfs_and_fat() {
    real("mkfs.vfat", &[], "a FAT file system");
    real(
        "mkfs.btrfs",
        &["-q", "-f", "--mixed"],
        "a btrfs file system",
    );
}

proptest! {
    #[test]
    fn never_panics(size in 0usize..200_000, places: Vec<(u32, u8)>) {
        let mut image = vec![0u8; size];
        for (at, byte) in places {
            if let Some(place) = image.get_mut(at as usize % size.max(1)) {
                *place = byte;
            }
        }
        let _ = look(&image);
    }
}

#[test]
fn images_and_pools_are_told_from_the_rest() {
    let formats: Vec<_> = CONTAINERS
        .iter()
        .filter_map(|mark| with(&[(mark.offset as usize, mark.magic)])?.image_format())
        .collect();
    assert_eq!(
        formats,
        ["qcow2", "qed", "vmdk", "vmdk", "vmdk", "vhdx", "vhd", "vdi"]
    );
    let pool = with(&[(0, &SUPERBLOCK_MAGIC)]).unwrap();
    assert!(pool.is_pool() && pool.image_format().is_none());
    let other = with(&[(0, b"XFSB")]).unwrap();
    assert!(!other.is_pool() && other.image_format().is_none());
}
