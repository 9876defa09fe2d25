//! Which other files an image names, read from its header by ourselves.
//!
//! QEMU follows what a header says: a backing file, an external data file, the extents of a VMDK,
//! even a whole description in JSON. Whoever can write an image could so make a process of ours
//! open, and in part write, any file of the host. So the names are read here first, without
//! following one, by a reader that takes nothing for granted: what it does not understand it
//! refuses. VDI and VHDX files name no others that QEMU would open (their differencing forms it
//! refuses), and a raw file names nothing. Of a differencing VHD, QEMU serves what the parent holds as zeros, so we refuse it.
//!
//! Layouts: QEMU's `docs/interop/qcow2.txt`; VMware's *Virtual Disk Format 5.0*; Microsoft's *Virtual Hard Disk Image
//! Format Specification*.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Longest name of a backing file, as QEMU has it.
const NAME_MAX: usize = 1023;
/// Bytes of a VMDK's descriptor that QEMU reads at most.
const DESCRIPTOR_MAX: u64 = (1 << 20) - 1;
/// Most files one image names. VMware splits a disk into pieces of 8,323,072 sectors: 259 for 1 TiB.
pub(crate) const NAMES_MAX: usize = 8192;
/// Bytes of a qcow2 header that are looked at: the largest cluster.
const QCOW2_HEAD_MAX: u64 = 2 << 20;

/// Reads bytes of an image: offset, buffer.
pub type Read<'a> = &'a mut dyn FnMut(u64, &mut [u8]) -> io::Result<()>;

/// What an image names, as it is written there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// The file that holds what this one does not.
    pub backing: Option<String>,
    /// The format of that file, if the image says.
    pub backing_format: Option<String>,
    /// The file that holds a qcow2's data.
    pub data: Option<String>,
    /// The files that hold a VMDK's data. Their names are bytes in the encoding of the host that made them, such as GBK.
    pub extents: Vec<PathBuf>,
    /// Those of them that are sparse: they have a header of their own.
    pub sparse: BTreeSet<PathBuf>,
}

impl Names {
    /// True if it names no other file.
    pub fn is_empty(&self) -> bool {
        self.backing.is_none() && self.data.is_none() && self.extents.is_empty()
    }
}

/// Why the names could not be read.
#[derive(Debug, thiserror::Error)]
pub enum NamesError {
    /// Reading failed.
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The header makes no sense where other files are named.
    #[error("its header is damaged or not understood: {0}")]
    Damaged(String),
    /// A VHD that holds only what differs from another one.
    #[error("it is a differencing VHD, whose parent QEMU does not open")]
    Differencing,
}

fn damaged(what: impl Into<String>) -> NamesError {
    NamesError::Damaged(what.into())
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn text(bytes: &[u8], what: &str) -> Result<String, NamesError> {
    let name = std::str::from_utf8(bytes).map_err(|_| damaged(format!("{what} is no text")))?;
    if name.len() > NAME_MAX || name.chars().any(char::is_control) {
        return Err(damaged(format!(
            "{what} is too long or has control characters in it"
        )));
    }
    Ok(name.to_owned())
}

/// What an image of `format` and `size` bytes names. One that is not of that format names nothing:
/// QEMU, which is told the format, refuses it.
pub fn names(format: &str, size: u64, read: Read<'_>) -> Result<Names, NamesError> {
    match format {
        "qcow2" => qcow2(size, read),
        "vmdk" => vmdk(size, read),
        "vhd" | "vpc" => vhd(size, read),
        _ => Ok(Names::default()),
    }
}

fn vhd(size: u64, read: Read<'_>) -> Result<Names, NamesError> {
    const FOOTER: u64 = 512;
    const TYPE_AT: usize = 60;
    const DIFFERENCING: u32 = 4;
    // The footer is at the end, in some files without its last byte. All but fixed ones have a copy at the start.
    for at in [
        0,
        size.saturating_sub(FOOTER),
        size.saturating_sub(FOOTER - 1),
    ] {
        let mut footer = vec![0u8; (size - at).min(FOOTER) as usize];
        if !footer.is_empty() {
            read(at, &mut footer)?;
        }
        let kind = array(&footer, TYPE_AT).map_or(0, u32::from_be_bytes);
        if footer.starts_with(b"conectix") && kind == DIFFERENCING {
            return Err(NamesError::Differencing);
        }
    }
    Ok(Names::default())
}

fn qcow2(size: u64, read: Read<'_>) -> Result<Names, NamesError> {
    const EXTERNAL_DATA: u64 = 1 << 2;
    const BACKING_FORMAT: u32 = 0xE279_2ACA;
    const DATA_FILE: u32 = 0x4441_5441;
    const V2_HEADER: u64 = 72;
    const V3_HEADER: u64 = 104;

    let mut head = vec![0u8; size.min(QCOW2_HEAD_MAX) as usize];
    // The sizes of clusters are not known yet, but most headers are within the first 64 KiB.
    let first = head.len().min(64 << 10);
    if let Some(part) = head.get_mut(..first) {
        read(0, part)?;
    }
    let u32_at = |bytes: &[u8], at: usize| {
        array(bytes, at)
            .map(u32::from_be_bytes)
            .ok_or_else(|| damaged("it is cut short"))
    };
    let u64_at = |bytes: &[u8], at: usize| {
        array(bytes, at)
            .map(u64::from_be_bytes)
            .ok_or_else(|| damaged("it is cut short"))
    };
    if !head.starts_with(b"QFI\xfb") {
        return Ok(Names::default());
    }
    let version = u32_at(&head, 4)?;
    let (features, header_len) = match version {
        2 => (0, V2_HEADER),
        3 => (u64_at(&head, 72)?, u64::from(u32_at(&head, 100)?)),
        // QEMU's driver knows no others.
        _ => return Ok(Names::default()),
    };
    let cluster_bits = u32_at(&head, 20)?;
    if !(9..=21).contains(&cluster_bits) {
        return Err(damaged("its cluster size is none"));
    }
    let cluster = 1u64 << cluster_bits;
    if version == 3 && !(V3_HEADER..=cluster).contains(&header_len) {
        return Err(damaged("its header's length is none"));
    }
    let end = cluster.min(size) as usize;
    if end > first
        && let Some(rest) = head.get_mut(first..end)
    {
        read(first as u64, rest)?;
    }
    head.truncate(end);
    let mut found = Names::default();
    let (offset, len) = (u64_at(&head, 8)?, u32_at(&head, 16)? as usize);
    if offset != 0 {
        if offset > cluster || len > NAME_MAX {
            return Err(damaged("its backing file's name lies outside the header"));
        }
        let name = head
            .get(offset as usize..)
            .and_then(|rest| rest.get(..len))
            .ok_or_else(|| damaged("its backing file's name is cut short"))?;
        let name = text(name, "its backing file's name")?;
        found.backing = Some(name).filter(|name| !name.is_empty());
    }
    // Extensions end where the backing file's name begins.
    let limit = if offset == 0 { end } else { offset as usize };
    let mut at = header_len as usize;
    while at + 8 <= limit {
        let (kind, len) = (u32_at(&head, at)?, u32_at(&head, at + 4)? as usize);
        at += 8;
        if kind == 0 {
            break;
        }
        let body = head
            .get(at..limit)
            .and_then(|rest| rest.get(..len))
            .ok_or_else(|| damaged("a header extension is longer than the header"))?;
        let twice = |place: &Option<String>| match place {
            Some(_) => Err(damaged("a header extension comes twice")),
            None => Ok(()),
        };
        match kind {
            BACKING_FORMAT => {
                twice(&found.backing_format)?;
                found.backing_format = Some(text(body, "its backing file's format")?);
            }
            DATA_FILE => {
                twice(&found.data)?;
                found.data = Some(text(body, "its data file's name")?);
            }
            _ => {}
        }
        at += len.next_multiple_of(8);
    }
    if features & EXTERNAL_DATA == 0 {
        found.data = None;
    } else if found.data.as_ref().is_none_or(String::is_empty) {
        return Err(damaged(
            "its data lies in another file, but it does not say which",
        ));
    }
    if found.backing.is_none() {
        found.backing_format = None;
    }
    Ok(found)
}

/// Bytes of a file that [`is_write_once`] needs.
pub(crate) const HEAD: usize = 79;

/// True for the header of a VMDK whose data is compressed (streamOptimized): QEMU cannot write a
/// cluster of it twice.
pub(crate) fn is_write_once(head: &[u8]) -> bool {
    const COMPRESSED: u32 = 1 << 16;
    let flags = array(head, 8).map_or(0, u32::from_le_bytes);
    let algorithm = array(head, 77).map_or(0, u16::from_le_bytes);
    head.starts_with(b"KDMV") && (flags & COMPRESSED != 0 || algorithm != 0)
}

fn vmdk(size: u64, read: Read<'_>) -> Result<Names, NamesError> {
    const SECTOR: u64 = 512;
    let mut head = vec![0u8; size.min(4096) as usize];
    if !head.is_empty() {
        read(0, &mut head)?;
    }
    let mut descriptor = |offset: u64| -> Result<Vec<u8>, NamesError> {
        let len = size.saturating_sub(offset).min(DESCRIPTOR_MAX);
        let mut bytes = vec![0u8; len as usize];
        if !bytes.is_empty() {
            read(offset, &mut bytes)?;
        }
        // It is text up to the first zero.
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        bytes.truncate(end);
        Ok(bytes)
    };
    let mut found = Names::default();
    let sparse = head.starts_with(b"KDMV") || head.starts_with(b"COWD");
    if !sparse {
        // QEMU, told that it is a VMDK, takes anything else for a descriptor.
        let text = descriptor(0)?;
        found.backing = parent(&text)?;
        (found.extents, found.sparse) = extents(&text)?;
        return Ok(found);
    }
    // The descriptor lies behind the header. Its extents count only if the header has no size.
    found.backing = parent(&descriptor(SECTOR)?)?;
    if head.starts_with(b"KDMV") {
        let u64_at = |at: usize| {
            array(&head, at)
                .map(u64::from_le_bytes)
                .ok_or_else(|| damaged("it is cut short"))
        };
        let (capacity, at) = (u64_at(12)?, u64_at(28)?);
        if at != 0 {
            let at = at
                .checked_mul(SECTOR)
                .filter(|at| *at < size)
                .ok_or_else(|| damaged("its descriptor lies outside the file"))?;
            let text = descriptor(at)?;
            if found.backing.is_none() {
                found.backing = parent(&text)?;
            }
            if capacity == 0 {
                (found.extents, found.sparse) = extents(&text)?;
            }
        }
    }
    Ok(found)
}

/// What is between the next two quotes.
fn quoted(text: &[u8]) -> Option<&[u8]> {
    let mut parts = text.split(|b| *b == b'"').skip(1);
    let inside = parts.next()?;
    parts.next().map(|_| inside)
}

/// The parent a VMDK descriptor names.
fn parent(descriptor: &[u8]) -> Result<Option<String>, NamesError> {
    const HINT: &[u8] = b"parentFileNameHint";
    let Some(at) = descriptor.windows(HINT.len()).position(|w| w == HINT) else {
        return Ok(None);
    };
    let rest = &descriptor[at + HINT.len()..];
    let name = Some(rest).filter(|rest| rest.starts_with(b"=\""));
    let name = name
        .and_then(quoted)
        .ok_or_else(|| damaged("its parent's name is not in quotes"))?;
    let name = text(name, "its parent's name")?;
    Ok(Some(name).filter(|name| !name.is_empty()))
}

/// The extents a VMDK descriptor names, and those of them that are sparse: lines such as
/// `RW 2048 FLAT "disk-flat.vmdk" 0`.
fn extents(descriptor: &[u8]) -> Result<(Vec<PathBuf>, BTreeSet<PathBuf>), NamesError> {
    let (mut found, mut sparse) = (Vec::new(), BTreeSet::new());
    let mut seen = BTreeSet::new();
    for line in descriptor.split(|b| *b == b'\n') {
        let mut words = line
            .split(u8::is_ascii_whitespace)
            .filter(|w| !w.is_empty());
        if !matches!(words.next(), Some(b"RW" | b"RDONLY" | b"NOACCESS")) {
            continue;
        }
        let kind = words.nth(1);
        if kind == Some(b"ZERO") {
            continue;
        }
        let name = quoted(line).ok_or_else(|| damaged("the name of an extent is not in quotes"))?;
        // Text is held to the stricter rules of text.
        let has_control = match std::str::from_utf8(name) {
            Ok(text) => text.chars().any(char::is_control),
            Err(_) => name.iter().any(u8::is_ascii_control),
        };
        if name.len() > NAME_MAX || has_control {
            return Err(damaged(
                "the name of an extent is too long or has control characters in it",
            ));
        }
        if name.is_empty() {
            return Err(damaged("an extent has no name"));
        }
        let name = PathBuf::from(OsString::from_vec(name.to_vec()));
        if kind == Some(b"SPARSE") {
            sparse.insert(name.clone());
        }
        if seen.insert(name.clone()) {
            found.push(name);
        }
        if found.len() > NAMES_MAX {
            return Err(damaged(format!("it names more than {NAMES_MAX} extents")));
        }
    }
    Ok((found, sparse))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(format: &str, image: &[u8]) -> Result<Names, NamesError> {
        let mut read = |offset: u64, data: &mut [u8]| {
            let from = image.get(offset as usize..).unwrap_or_default();
            let bytes = from.get(..data.len());
            data.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        };
        names(format, image.len() as u64, &mut read)
    }

    /// A version 3 header with extensions and a backing file's name.
    fn header(features: u64, extensions: &[(u32, &[u8])], backing: &[u8]) -> Vec<u8> {
        let mut image = vec![0u8; 65536];
        image[..4].copy_from_slice(b"QFI\xfb");
        image[4..8].copy_from_slice(&3u32.to_be_bytes());
        image[20..24].copy_from_slice(&16u32.to_be_bytes());
        image[72..80].copy_from_slice(&features.to_be_bytes());
        image[100..104].copy_from_slice(&104u32.to_be_bytes());
        let mut at = 104;
        for (kind, body) in extensions {
            image[at..at + 4].copy_from_slice(&kind.to_be_bytes());
            image[at + 4..at + 8].copy_from_slice(&(body.len() as u32).to_be_bytes());
            image[at + 8..at + 8 + body.len()].copy_from_slice(body);
            at += 8 + body.len().next_multiple_of(8);
        }
        if !backing.is_empty() {
            let place = 4096u64;
            image[8..16].copy_from_slice(&place.to_be_bytes());
            image[16..20].copy_from_slice(&(backing.len() as u32).to_be_bytes());
            image[4096..4096 + backing.len()].copy_from_slice(backing);
        }
        image
    }

    #[test]
    fn what_a_qcow2_names() {
        assert!(of("qcow2", &header(0, &[], b"")).unwrap().is_empty());
        let format = (0xE279_2ACA, &b"raw"[..]);
        let data = (0x4441_5441, &b"/srv/data.raw"[..]);
        let found = of("qcow2", &header(4, &[format, data], b"base.raw")).unwrap();
        assert_eq!(found.backing.as_deref(), Some("base.raw"));
        assert_eq!(found.backing_format.as_deref(), Some("raw"));
        assert_eq!(found.data.as_deref(), Some("/srv/data.raw"));
        // Without its bit the name means nothing, and QEMU does not look at it.
        assert_eq!(of("qcow2", &header(0, &[data], b"")).unwrap().data, None);
        assert!(of("raw", &header(4, &[data], b"x")).unwrap().is_empty());
    }

    #[test]
    fn what_a_vmdk_names() {
        let text = "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=2\n\
            parentFileNameHint=\"base.vmdk\"\nRW 4192256 SPARSE \"a-s001.vmdk\"\n\
            RW 8 FLAT \"/etc/shadow\" 0\nRW 2048 ZERO\nddb.adapterType = \"ide\"\n";
        let found = of("vmdk", text.as_bytes()).unwrap();
        assert_eq!(found.backing.as_deref(), Some("base.vmdk"));
        let names = ["a-s001.vmdk", "/etc/shadow"].map(PathBuf::from);
        assert_eq!(found.extents, names);
        assert!(found.sparse.iter().eq(&names[..1]));
        // Inside a sparse file the extents count only where the header has no size of its own.
        for (capacity, extents) in [(2048u64, 0), (0, 2)] {
            let mut image = vec![0u8; 8192];
            image[..4].copy_from_slice(b"KDMV");
            image[12..20].copy_from_slice(&capacity.to_le_bytes());
            image[28..36].copy_from_slice(&1u64.to_le_bytes());
            image[512..512 + text.len()].copy_from_slice(text.as_bytes());
            let found = of("vmdk", &image).unwrap();
            assert_eq!(found.backing.as_deref(), Some("base.vmdk"));
            assert_eq!(found.extents.len(), extents);
        }
    }

    #[test]
    fn vmdk_of_many_pieces_names_all() {
        let lines = |count: usize| -> String {
            let line = |n: usize| format!("RW 8323072 FLAT \"disk-f{n:03}.vmdk\" 0\r\n");
            (1..=count).map(line).collect()
        };
        let found = of("vmdk", lines(4144).as_bytes()).unwrap();
        assert_eq!(found.extents.len(), 4144);
        assert_eq!(found.extents[4143], PathBuf::from("disk-f4144.vmdk"));
        assert!(of("vmdk", lines(NAMES_MAX + 1).as_bytes()).is_err());
    }

    #[test]
    fn vmdk_names_in_other_encodings_are_bytes() {
        // GBK, Shift-JIS with a backslash for its second byte, Latin-1.
        for name in [
            &b"\xd0\xe9\xc4\xe2-flat.vmdk"[..],
            b"\x83\x5c.vmdk",
            b"f\xfcr.vmdk",
        ] {
            let text = [b"encoding=\"GBK\"\nRW 8 FLAT \"", name, b"\" 0\n"].concat();
            let found = of("vmdk", &text).unwrap();
            assert_eq!(
                found.extents,
                [PathBuf::from(OsString::from_vec(name.to_vec()))]
            );
        }
        for name in [&b"\xd0\x01"[..], b"\xc2\x85", &[b'\xd0'; NAME_MAX + 1]] {
            let text = [b"RW 8 FLAT \"", name, b"\" 0\n"].concat();
            assert!(of("vmdk", &text).is_err(), "{name:?}");
        }
    }

    #[test]
    fn differencing_vhd_is_refused() {
        let footer = |kind: u32| {
            let mut footer = vec![0u8; 512];
            footer[..8].copy_from_slice(b"conectix");
            footer[60..64].copy_from_slice(&kind.to_be_bytes());
            footer
        };
        for format in ["vhd", "vpc"] {
            for kind in [2, 3] {
                let whole = [footer(kind), vec![0; 4096], footer(kind)].concat();
                assert!(of(format, &whole).unwrap().is_empty());
            }
            let copied = [footer(4), vec![0; 4096]].concat();
            let at_end = [vec![0; 4096], footer(4)].concat();
            for image in [&copied[..], &at_end, &at_end[..at_end.len() - 1]] {
                let refused = of(format, image);
                assert!(
                    matches!(refused, Err(NamesError::Differencing)),
                    "{refused:?}"
                );
            }
            for cut in 0..600 {
                let _ = of(format, &copied[..cut]);
            }
        }
    }

    /// Headers as `qemu-img` and ovftool write them: version 3, flags 0x30001, deflate.
    #[test]
    fn compressed_vmdk_is_write_once() {
        let head = |flags: u32, algorithm: u16| {
            let mut head = vec![0u8; HEAD];
            head[..4].copy_from_slice(b"KDMV");
            head[4..8].copy_from_slice(&3u32.to_le_bytes());
            head[8..12].copy_from_slice(&flags.to_le_bytes());
            head[77..79].copy_from_slice(&algorithm.to_le_bytes());
            head
        };
        assert!(is_write_once(&head(0x30001, 1)));
        assert!(is_write_once(&head(3, 1)) && is_write_once(&head(0x10001, 0)));
        assert!(!is_write_once(&head(3, 0)));
        for len in 0..4 {
            assert!(!is_write_once(&head(0x30001, 1)[..len]));
        }
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let data = (0x4441_5441, &b"x"[..]);
        let mut far = header(0, &[], b"x");
        far[8..16].copy_from_slice(&(1u64 << 40).to_be_bytes());
        let mut long = header(4, &[data], b"");
        long[108..112].copy_from_slice(&u32::MAX.to_be_bytes());
        let mut clusters = header(0, &[], b"");
        clusters[20..24].copy_from_slice(&63u32.to_be_bytes());
        for (what, image) in [
            ("backing name outside", far),
            ("extension too long", long),
            ("cluster size", clusters),
            ("no data file", header(4, &[], b"")),
            ("two data files", header(4, &[data, data], b"")),
            ("no text", header(0, &[], b"\xff\xfe")),
            ("a line break", header(0, &[], b"a\nb")),
            ("cut short", b"QFI\xfb\0\0\0\x03".to_vec()),
        ] {
            let error = of("qcow2", &image);
            assert!(
                matches!(error, Err(NamesError::Damaged(_))),
                "{what}: {error:?}"
            );
        }
        let quotes = b"# Disk DescriptorFile\nRW 8 FLAT /etc/shadow 0\n";
        assert!(of("vmdk", quotes).is_err());
    }

    #[test]
    fn any_bytes_are_survived() {
        let whole = header(4, &[(0x4441_5441, b"data")], b"base");
        for at in 0..160 {
            for value in [0u8, 1, 0x7f, 0xff] {
                let mut image = whole.clone();
                image[at] = value;
                let _ = of("qcow2", &image);
                image.truncate(at);
                let _ = of("qcow2", &image);
                let _ = of("vmdk", &image);
            }
        }
    }
}
