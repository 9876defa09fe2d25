//! Whether a device already holds something.
//!
//! Formatting the wrong device destroys somebody's data, and names such as `/dev/sdb` move
//! between boots. So before a device is formatted, its start and end are searched for the
//! marks of file systems, partition tables, volume managers, RAID members, other caches and
//! disk images. A match is a reason to refuse until the user insists; no match proves nothing.
//!
//! Marks lie at the start or the end of a device, at the places each format's documentation
//! gives; blocks read are aligned, so that an `O_DIRECT` handle will do.

use crate::layout::SUPERBLOCK_BLOCKS;
use crate::superblock::SUPERBLOCK_MAGIC;
use crate::wire::{array_at, u16_at, u32_at, u64_at};
use std::io;

#[cfg(test)]
mod tests;

/// Something recognised on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// In words, with its article: `an ext4 file system`.
    pub what: String,
    /// Byte offset of the mark.
    pub offset: u64,
}

/// What [`identify`] calls a pool of ours.
const HEARTH_POOL: &str = "a Hearth pool";

/// What [`identify`] calls a raw disk with a VHD's footer behind it.
const FIXED_VHD: &str = "a fixed VHD disk image";

impl Found {
    /// True for a pool of Hearth.
    pub fn is_pool(&self) -> bool {
        self.what == HEARTH_POOL
    }

    /// True for a fixed VHD: a raw disk with a footer behind it.
    pub fn is_footer_only(&self) -> bool {
        self.what == FIXED_VHD
    }

    /// For a disk image, its format's usual short name.
    pub fn image_format(&self) -> Option<&'static str> {
        let format = |word: &str| match word {
            "qcow2" => Some("qcow2"),
            "QED" => Some("qed"),
            "VMDK" => Some("vmdk"),
            "VHDX" => Some("vhdx"),
            "VHD" => Some("vhd"),
            "VDI" => Some("vdi"),
            _ => None,
        };
        self.what.split(' ').find_map(format)
    }
}

/// Bytes looked at from the start: up to the second superblock copy of a pool and the marks
/// of VMFS, both at 1 MiB.
const HEAD_BYTES: u64 = (1 << 20) + (64 << 10);
/// Bytes looked at before the end: ZFS labels lie up to 768 KiB before it.
const TAIL_BYTES: u64 = 1 << 20;

/// A mark at a fixed offset.
struct Mark {
    what: &'static str,
    offset: u64,
    magic: &'static [u8],
}

const fn mark(what: &'static str, offset: u64, magic: &'static [u8]) -> Mark {
    Mark {
        what,
        offset,
        magic,
    }
}

/// Disk images, encryption, volume managers and caches: looked for first, since a file system
/// may shine through them.
const CONTAINERS: &[Mark] = &[
    mark("a qcow2 disk image", 0, b"QFI\xfb"),
    mark("a QED disk image", 0, b"QED\0"),
    mark("a VMDK disk image", 0, b"KDMV"),
    mark("a VMDK disk image", 0, b"COWD"),
    mark("a VMDK descriptor", 0, b"# Disk DescriptorFile"),
    mark("a VHDX disk image", 0, b"vhdxfile"),
    mark("a VHD disk image", 0, b"conectix"),
    mark("a VDI disk image", 64, &0xbeda_107fu32.to_le_bytes()),
    mark("a LUKS encrypted volume", 0, b"LUKS\xba\xbe"),
    mark(
        "a LUKS encrypted volume (second header)",
        0x4000,
        b"SKUL\xba\xbe",
    ),
    mark("a BitLocker encrypted volume", 3, b"-FVE-FS-"),
    mark(
        "a bcache device",
        4096 + 24,
        b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81",
    ),
    mark(
        "a bcachefs file system",
        4096 + 24,
        b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef",
    ),
    mark("a Ceph BlueStore volume", 0, b"bluestore block device\n"),
    mark("a VDO volume", 0, b"dmvdo001"),
    mark("a dm-integrity volume", 0, b"integrt\0"),
    mark("a dm-writecache cache", 0, &0x2348_9321u32.to_le_bytes()),
    mark(
        "a dm-cache metadata volume",
        32,
        &0o6142003u64.to_le_bytes(),
    ),
    mark(
        "a dm-thin metadata volume",
        32,
        &27_022_010u64.to_le_bytes(),
    ),
    mark("a VMFS volume", 1 << 20, &0xc001_d00du32.to_le_bytes()),
];

/// File systems and swap.
const FILE_SYSTEMS: &[Mark] = &[
    mark("an XFS file system", 0, b"XFSB"),
    mark("a btrfs file system", 65536 + 64, b"_BHRfS_M"),
    mark("an NTFS file system", 3, b"NTFS    "),
    mark("an exFAT file system", 3, b"EXFAT   "),
    mark("a ReFS file system", 3, b"ReFS\0\0\0\0"),
    mark("an F2FS file system", 1024, &0xF2F5_2010u32.to_le_bytes()),
    mark("a ReiserFS file system", 65536 + 52, b"ReIsErFs"),
    mark("a ReiserFS file system", 65536 + 52, b"ReIsEr2Fs"),
    mark("a ReiserFS file system", 65536 + 52, b"ReIsEr3Fs"),
    mark("a JFS file system", 32768, b"JFS1"),
    mark("an APFS container", 32, b"NXSB"),
    mark("an HFS+ file system", 1024, b"H+\0\x04"),
    mark("an HFSX file system", 1024, b"HX\0\x05"),
    mark("a GFS2 file system", 65536, b"\x01\x16\x19\x70"),
    mark("an OCFS2 file system", 1024, b"OCFSV2"),
    mark("an OCFS2 file system", 2048, b"OCFSV2"),
    mark("an OCFS2 file system", 4096, b"OCFSV2"),
    mark("an OCFS2 file system", 8192, b"OCFSV2"),
    mark("a SquashFS file system", 0, b"hsqs"),
    mark("an EROFS file system", 1024, &0xE0F5_E1E2u32.to_le_bytes()),
    mark("an ISO 9660 file system", 32769, b"CD001"),
    mark("a UDF file system", 32769, b"BEA01"),
];

/// Page sizes Linux swap areas are made with.
const SWAP_PAGES: [u64; 4] = [4096, 8192, 16384, 65536];

/// What a Linux swap area carries in the last ten bytes of its first page.
const SWAP_MAGICS: [&[u8]; 3] = [b"SWAPSPACE2", b"SWAP-SPACE", b"S1SUSPEND\0"];

/// Looks at a device of `size` bytes through `read` (offset, buffer) and names what it holds.
///
/// Reads at most about 2 MiB, in at most two calls, with offsets that are multiples of 4096 and
/// nothing past `size`. `Ok(None)` means nothing was recognised; an error is `read`'s.
pub fn identify(
    read: &mut dyn FnMut(u64, &mut [u8]) -> io::Result<()>,
    size: u64,
) -> io::Result<Option<Found>> {
    let mut head = vec![0u8; size.min(HEAD_BYTES) as usize];
    if !head.is_empty() {
        read(0, &mut head)?;
    }
    let tail_start = size.saturating_sub(TAIL_BYTES) / 4096 * 4096;
    let mut tail = Vec::new();
    if size > HEAD_BYTES {
        tail.resize((size - tail_start) as usize, 0);
        read(tail_start, &mut tail)?;
    }
    let view = View {
        size,
        head,
        tail_start,
        tail,
    };
    Ok(hearth_pool(&view)
        .or_else(|| first_of(&view, CONTAINERS))
        .or_else(|| lvm(&view))
        .or_else(|| md(&view))
        .or_else(|| other_at_end(&view))
        .or_else(|| zfs(&view))
        .or_else(|| first_of(&view, FILE_SYSTEMS))
        .or_else(|| ext(&view))
        .or_else(|| swap(&view))
        .or_else(|| fat(&view))
        .or_else(|| gpt(&view))
        .or_else(|| mbr(&view)))
}

/// The two ends of a device, addressed by device offsets.
struct View {
    size: u64,
    head: Vec<u8>,
    tail_start: u64,
    tail: Vec<u8>,
}

impl View {
    /// `len` bytes at `offset`, if they are in view.
    fn at(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let within = |start: u64, bytes: &'_ [u8]| -> Option<std::ops::Range<usize>> {
            let from = usize::try_from(offset.checked_sub(start)?).ok()?;
            let to = from.checked_add(len)?;
            (to <= bytes.len()).then_some(from..to)
        };
        if let Some(range) = within(0, &self.head) {
            return self.head.get(range);
        }
        within(self.tail_start, &self.tail).and_then(|range| self.tail.get(range))
    }

    fn has(&self, offset: u64, magic: &[u8]) -> bool {
        self.at(offset, magic.len())
            .is_some_and(|bytes| bytes == magic)
    }
}

fn found(what: &str, offset: u64) -> Option<Found> {
    Some(Found {
        what: what.to_owned(),
        offset,
    })
}

fn first_of(view: &View, marks: &[Mark]) -> Option<Found> {
    let hit = marks
        .iter()
        .find(|mark| view.has(mark.offset, mark.magic))?;
    found(hit.what, hit.offset)
}

fn hearth_pool(view: &View) -> Option<Found> {
    let offset = SUPERBLOCK_BLOCKS
        .into_iter()
        .map(|block| block * hearth_io::BLOCK)
        .find(|offset| view.has(*offset, &SUPERBLOCK_MAGIC))?;
    found(HEARTH_POOL, offset)
}

/// LVM2: a label in one of the first four sectors (lvm.conf `scan` of label sectors).
fn lvm(view: &View) -> Option<Found> {
    let offset = (0..4)
        .map(|sector| sector * 512)
        .find(|at| view.has(*at, b"LABELONE") && view.has(at + 24, b"LVM2 001"))?;
    found("an LVM2 physical volume", offset)
}

/// Linux software RAID; places by version as in md(4).
fn md(view: &View) -> Option<Found> {
    const MAGIC: u32 = 0xa92b_4efc;
    let sectors = view.size / 512;
    let version_1 = [
        ("a Linux RAID member (md 1.1)", Some(0)),
        ("a Linux RAID member (md 1.2)", Some(4096)),
        (
            "a Linux RAID member (md 1.0)",
            sectors.checked_sub(16).map(|s| s / 8 * 8 * 512),
        ),
    ];
    for (what, offset) in version_1 {
        if let Some(offset) = offset
            && let Some(bytes) = view.at(offset, 8)
            && u32_at(bytes, 0) == MAGIC
            && u32_at(bytes, 4) == 1
        {
            return found(what, offset);
        }
    }
    let offset = (view.size / 65536 * 65536).checked_sub(65536)?;
    let magic: [u8; 4] = array_at(view.at(offset, 4)?, 0);
    if magic == MAGIC.to_le_bytes() || magic == MAGIC.to_be_bytes() {
        return found("a Linux RAID member (md 0.90)", offset);
    }
    None
}

/// Marks counted from the end of the device.
fn other_at_end(view: &View) -> Option<Found> {
    let vhd = view.size.checked_sub(512);
    if let Some(offset) = vhd.filter(|at| view.has(*at, b"conectix")) {
        return found(FIXED_VHD, offset);
    }
    let imsm = (view.size / 512 * 512).checked_sub(1024);
    if let Some(offset) = imsm.filter(|at| view.has(*at, b"Intel Raid ISM Cfg Sig. ")) {
        return found("an Intel RAID member", offset);
    }
    let ddf = (view.size / 512 * 512).checked_sub(512);
    if let Some(offset) = ddf.filter(|at| view.has(*at, &0xDE11_DE11u32.to_be_bytes())) {
        return found("a DDF RAID member", offset);
    }
    let drbd = (view.size / 4096 * 4096).checked_sub(4096)?;
    // Metadata of DRBD 8.3, 8.4 (unclean) and 9, all with the magic at the same place.
    let magic = view
        .at(drbd + 60, 4)
        .map(|bytes| u32::from_be_bytes(array_at(bytes, 0)))?;
    if (0x8374_026b..=0x8374_026d).contains(&magic) {
        return found("a DRBD backing device", drbd);
    }
    None
}

/// ZFS: four labels, each with a ring of 128 uberblocks in its second half.
fn zfs(view: &View) -> Option<Found> {
    const LABEL: u64 = 256 << 10;
    const RING: u64 = 128 << 10;
    const MAGIC: u64 = 0x00ba_b10c;
    let end = view.size / LABEL * LABEL;
    let labels = [
        Some(0),
        Some(LABEL),
        end.checked_sub(2 * LABEL),
        end.checked_sub(LABEL),
    ];
    for label in labels.into_iter().flatten() {
        for slot in 0..128 {
            let offset = label + RING + slot * 1024;
            let magic = view.at(offset, 8).map(|bytes| u64_at(bytes, 0));
            if magic == Some(MAGIC) || magic == Some(MAGIC.swap_bytes()) {
                return found("a ZFS pool member", offset);
            }
        }
    }
    None
}

/// ext2/3/4, told apart by their feature words.
fn ext(view: &View) -> Option<Found> {
    const HAS_JOURNAL: u32 = 0x4;
    const JOURNAL_DEVICE: u32 = 0x8;
    // Extents, 64-bit, flexible block groups.
    const EXT4_INCOMPAT: u32 = 0x40 | 0x80 | 0x200;
    let superblock = view.at(1024, 1024)?;
    if u16_at(superblock, 56) != 0xEF53 {
        return None;
    }
    let (compat, incompat) = (u32_at(superblock, 92), u32_at(superblock, 96));
    let what = if incompat & JOURNAL_DEVICE != 0 {
        "an ext3/ext4 journal device"
    } else if incompat & EXT4_INCOMPAT != 0 {
        "an ext4 file system"
    } else if compat & HAS_JOURNAL != 0 {
        "an ext3 file system"
    } else {
        "an ext2 file system"
    };
    found(what, 1024 + 56)
}

fn swap(view: &View) -> Option<Found> {
    let offset = SWAP_PAGES
        .into_iter()
        .map(|page| page - 10)
        .find(|offset| SWAP_MAGICS.iter().any(|magic| view.has(*offset, magic)))?;
    found("Linux swap space", offset)
}

/// FAT has no magic worth the name; the BIOS parameter block must make sense as a whole.
fn fat(view: &View) -> Option<Found> {
    let boot = view.at(0, 512)?;
    let byte = |at: usize| boot.get(at).copied().unwrap_or_default();
    let jump = (byte(0) == 0xEB && byte(2) == 0x90) || byte(0) == 0xE9;
    let sector = u16_at(boot, 11);
    let plausible = jump
        && view.has(510, b"\x55\xaa")
        && sector.is_power_of_two()
        && (512..=4096).contains(&sector)
        && byte(13).is_power_of_two()
        && u16_at(boot, 14) != 0
        && (1..=2).contains(&byte(16))
        && byte(21) >= 0xF0;
    plausible.then(|| Found {
        what: "a FAT file system".to_owned(),
        offset: 0,
    })
}

fn gpt(view: &View) -> Option<Found> {
    for sector in [512, 4096] {
        let backup = view.size.checked_sub(sector).map(|at| at / sector * sector);
        if view.has(sector, b"EFI PART") {
            return found("a GPT partition table", sector);
        }
        if let Some(offset) = backup.filter(|at| view.has(*at, b"EFI PART")) {
            return found("a backup GPT partition table", offset);
        }
    }
    None
}

fn mbr(view: &View) -> Option<Found> {
    let sector = view.at(0, 512)?;
    if !view.has(510, b"\x55\xaa") {
        return None;
    }
    let (entries, _) = sector.get(446..510)?.as_chunks::<16>();
    let sane = entries.iter().all(|entry| entry[0] & 0x7f == 0);
    let used = entries
        .iter()
        .any(|entry| entry[4] != 0 && u32_at(entry, 12) != 0);
    found(
        if sane && used {
            "an MBR partition table"
        } else {
            "a boot sector"
        },
        510,
    )
}
