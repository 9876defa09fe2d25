//! The files below an image: resolved by us, confined, and named to QEMU one by one.
//!
//! An image may be an overlay on a base, keep its data in another file, or be a list of pieces. What
//! it says about them is only a wish: [`Chain::resolve`] follows the names itself ([`names`]
//! (crate::names)), refuses whatever is no plain file below a directory the host's owner has named,
//! and what it found is what QEMU is told to open, so that QEMU follows no name by itself. As
//! lines of text a chain is kept with the disk; if it is another one day, somebody changed it.
//!
//! Who may write in the directories of a chain may change what a name leads to at any moment. So a
//! file is opened once, and what was opened is judged and read, never its name again; and what
//! QEMU has opened by that name is compared with it by number.

use crate::names::{self, Names, NamesError, names};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hearth_fault::Fault;

/// Images on top of each other at most. Each is a process's open file, and a step for every read.
const DEPTH_MAX: usize = 32;
/// Bytes of all names together, as the registry keeps them.
const TEXT_MAX: usize = 32 << 10;
/// Bytes of a backing file without a stated format that are looked at for marks of one.
const MARK_BYTES: usize = 512;

/// What a disk may have below its image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backing {
    /// The image may name other files.
    pub allowed: bool,
    /// The files lie below one of these; if there are none, beside the image.
    pub dirs: Vec<PathBuf>,
    /// The chain as it was allowed; `None` to take it as it is found.
    pub known: Option<Vec<String>>,
    /// Nobody may write a base meanwhile. Not where another disk of ours does, which is older than these
    /// rules.
    pub hold_bases: bool,
    /// The disk is older than these rules: where its files lie is its own business.
    pub unconfined: bool,
}

/// What a file is to the image above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It holds what the image does not. Only read.
    Backing,
    /// It holds the data of a qcow2.
    Data,
    /// It is a piece of a VMDK.
    Extent,
    /// It is a base that is no plain file, or of a format that Hearth does not open, below an image older
    /// than these rules. QEMU follows the name as it did before; only that it stays the same is seen to.
    Unjudged,
}

/// What such a base is called in a chain's text.
const UNJUDGED: &str = "unjudged";

/// One file below an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// What it is.
    pub role: Role,
    /// Its format.
    pub format: String,
    /// Where it is, without symbolic links.
    pub path: PathBuf,
}

/// What pieces whose names are numbered are called in a chain's text: their count and the first one follow.
const EXTENTS: &str = "extents";
/// Ends the word before a path with bytes that are not text, or a line break: they are written as `%E9`.
const ENCODED: char = '%';

impl Link {
    /// As it is kept and shown: what it is, a colon, its path.
    pub fn text(&self) -> String {
        let what = match self.role {
            Role::Backing => &self.format,
            Role::Data => "data",
            Role::Extent => "extent",
            Role::Unjudged => UNJUDGED,
        };
        match self.path.to_str().filter(|path| !path.contains('\n')) {
            Some(path) => format!("{what}:{path}"),
            None => format!("{what}{ENCODED}:{}", encoded(&self.path)),
        }
    }
}

/// A path as text from which [`path_of`] makes the same bytes.
fn encoded(path: &Path) -> String {
    let mut text = String::new();
    for byte in path.as_os_str().as_bytes() {
        if byte.is_ascii_graphic() && *byte != b'%' {
            text.push(char::from(*byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

/// The word and the path in a line of a chain's text.
fn path_of(line: &str) -> Option<(&str, PathBuf)> {
    let (word, path) = line.split_once(':')?;
    let Some(word) = word.strip_suffix(ENCODED) else {
        return Some((word, PathBuf::from(path)));
    };
    let mut parts = path.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (hex, rest) = part.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(hex, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    Some((word, PathBuf::from(OsString::from_vec(bytes))))
}

/// A line for a piece that is numbered, in three parts: before its number, the number, and behind it.
fn numbered(line: &str) -> Option<(&str, &str, &str)> {
    let path = line.strip_prefix("extent:")?;
    let name_at = path.rfind('/').map_or(0, |at| at + 1);
    let end = path.rfind(|c: char| c.is_ascii_digit())? + 1;
    let before = path[..end].trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = &path[before.len()..end];
    let fits = before.len() >= name_at && digits.len() <= 9;
    fits.then_some((before, digits, &path[end..]))
}

/// The piece that is `n` numbers further on.
fn further((before, digits, behind): (&str, &str, &str), n: usize) -> Option<String> {
    let number = digits.parse::<usize>().ok()?.checked_add(n)?;
    let width = digits.len();
    Some(format!("extent:{before}{number:0width$}{behind}"))
}

/// A chain's text with a line for each run of numbered pieces: a disk of 1 TiB has 259, and the registry is small.
fn packed(lines: &[String]) -> Vec<String> {
    let mut out = Vec::new();
    let mut rest = lines;
    while let Some((first, _)) = rest.split_first() {
        let run = numbered(first).map_or(1, |parts| {
            let same = |(n, line): &(usize, &String)| further(parts, *n).as_ref() == Some(*line);
            rest.iter().enumerate().take_while(same).count().max(1)
        });
        out.push(match first.split_once(':') {
            Some((_, path)) if run > 1 => format!("{EXTENTS}:{run}:{path}"),
            _ => first.clone(),
        });
        rest = &rest[run..];
    }
    out
}

/// A chain's text with a line for each file.
fn unpacked(lines: &[String]) -> Vec<String> {
    let run = |line: &str| -> Option<Vec<String>> {
        let (count, path) = line
            .strip_prefix(EXTENTS)?
            .strip_prefix(':')?
            .split_once(':')?;
        let count = count.parse::<usize>().ok()?.min(names::NAMES_MAX);
        let first = format!("extent:{path}");
        let parts = numbered(&first)?;
        (0..count).map(|n| further(parts, n)).collect()
    };
    let all = lines
        .iter()
        .map(|line| run(line).unwrap_or_else(|| vec![line.clone()]));
    all.flatten().collect()
}

/// True if two texts name the same files in the same way.
pub fn is_same_chain(one: &[String], other: &[String]) -> bool {
    unpacked(one) == unpacked(other)
}

/// The files in a chain's text, and whether the topmost image is written through them.
pub fn files_of(chain: &[String]) -> Vec<(PathBuf, bool)> {
    let mut written = true;
    let mut files = Vec::new();
    for line in unpacked(chain) {
        let Some((what, path)) = path_of(&line) else {
            continue;
        };
        written &= matches!(what, "data" | "extent");
        if what == UNJUDGED {
            continue;
        }
        files.push((path, written));
    }
    files
}

/// All files below an image, from the top.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// The files.
    pub links: Vec<Link>,
    /// The image's data is compressed in place: a cluster that was written once cannot be written again.
    pub write_once: bool,
    /// The image and these files by their numbers, as they were judged.
    files: BTreeSet<(u64, u64)>,
}

/// Why an image's files are refused.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum ChainError {
    /// It names others, and nobody has allowed that.
    NotAllowed {
        /// The image.
        image: String,
        /// What it names.
        name: String,
    },
    /// A name that is none of a file.
    NoPath {
        /// The image.
        image: String,
        /// What it names.
        name: String,
    },
    /// A file outside the directories that were named.
    Outside {
        /// The image.
        image: String,
        /// The file, without symbolic links.
        path: String,
        /// The directories.
        dirs: String,
    },
    /// A file that cannot be opened.
    Missing {
        /// The image.
        image: String,
        /// The file.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// A header that makes no sense.
    Names {
        /// The image.
        image: String,
        /// Why.
        source: NamesError,
    },
    /// A base of unknown format that does not look raw.
    Format {
        /// The image.
        image: String,
        /// The base.
        path: String,
    },
    /// A format nobody serves.
    Unknown {
        /// The image.
        image: String,
        /// The base.
        path: String,
        /// What it says.
        format: String,
    },
    /// A file that is below itself.
    Loop {
        /// The image.
        image: String,
        /// The file.
        path: String,
    },
    /// More than anybody needs.
    Deep {
        /// The image.
        image: String,
    },
    /// Another chain than was allowed.
    Changed {
        /// The image.
        image: String,
        /// What differs.
        difference: String,
    },
}

impl ChainError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            ChainError::NotAllowed { image, name } => Fault::new(
                format!(
                    "the image {image} names another file of this host, {name}, which is not followed unasked"
                ),
                "if you know who made the image, allow it with --allow-backing (not for a leg of a mirror), else make it stand alone with `qemu-img convert`",
            ),
            ChainError::NoPath { image, name } => Fault::new(
                format!("the image {image} names {name}, which is no plain path of a file"),
                "give it one with `qemu-img rebase -u`",
            ),
            ChainError::Outside { image, path, dirs } => Fault::new(
                format!("the image {image} names {path}, which lies outside {dirs}"),
                "move it there, or start the daemon with --backing-dir and its directory",
            ),
            ChainError::Missing {
                image,
                path,
                source,
            } => Fault::new(
                format!("{path}, which the image {image} needs, cannot be opened: {source}"),
                "bring it back",
            ),
            ChainError::Names { image, source } => Fault::new(
                format!("the image {image} cannot be judged: {source}"),
                match source {
                    NamesError::Differencing => "merge it into its parent first".to_owned(),
                    _ => format!("see `qemu-img info {image}`"),
                },
            ),
            ChainError::Format { image, path } => Fault::new(
                format!(
                    "the image {image} does not say of which format {path} is, and its content looks like another image, which a guest may have written"
                ),
                format!("say it with `qemu-img rebase -u -F FORMAT -b {path} {image}`"),
            ),
            ChainError::Unknown {
                image,
                path,
                format,
            } => Fault::new(
                format!(
                    "the image {image} says that {path} is of format {format:?}, which Hearth does not open"
                ),
                "convert it to qcow2",
            ),
            ChainError::Loop { image, path } => Fault::new(
                format!("the image {image} names {path}, which it lies below itself"),
                "repair it with `qemu-img rebase`",
            ),
            ChainError::Deep { image } => Fault::new(
                format!(
                    "the image {image} has more than {DEPTH_MAX} others below it, or their names are too long"
                ),
                "shorten the chain with `qemu-img rebase` or `qemu-img commit`",
            ),
            ChainError::Changed { image, difference } => Fault::new(
                format!(
                    "the files below the image {image} are not those that were allowed: {difference}"
                ),
                "if that is meant, `hearth disk set NAME --allow-backing` takes them over, else put them back",
            ),
        }
    }
}

/// Number of a file, whatever it is called.
fn number(meta: &Metadata) -> (u64, u64) {
    if meta.file_type().is_block_device() {
        (u64::MAX, meta.rdev())
    } else {
        (meta.dev(), meta.ino())
    }
}

/// A file or block device that was found by a name, and is this one whatever the name leads to later.
struct Place {
    /// Open for nothing but to stand for it.
    held: File,
    /// Where it is, without symbolic links.
    path: PathBuf,
    number: (u64, u64),
}

impl Place {
    fn find(called: &Path) -> io::Result<Place> {
        let held = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_CLOEXEC)
            .open(called)?;
        let meta = held.metadata()?;
        let kind = meta.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::other("it is neither a file nor a block device"));
        }
        // Its last name is not where it is any more.
        if meta.nlink() == 0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Place {
            path: std::fs::read_link(descriptor(&held))?,
            number: number(&meta),
            held,
        })
    }

    /// Opens it for a look, with its size.
    fn open(&self) -> io::Result<(File, u64)> {
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(descriptor(&self.held))?;
        let size = file.seek(SeekFrom::End(0))?;
        Ok((file, size))
    }

    /// The format its first bytes claim, so that it should not be taken for raw by default.
    fn looks_like(&self) -> io::Result<Option<&'static str>> {
        let (file, size) = self.open()?;
        let mut head = vec![0u8; MARK_BYTES.min(size as usize)];
        file.read_exact_at(&mut head, 0)?;
        Ok(probed(&head))
    }

    /// True if it is a VMDK whose clusters cannot be written twice.
    fn is_write_once(&self) -> io::Result<bool> {
        let (file, size) = self.open()?;
        let mut head = vec![0u8; names::HEAD.min(size as usize)];
        file.read_exact_at(&mut head, 0)?;
        Ok(names::is_write_once(&head))
    }

    /// What it names as an image that was called `called`.
    fn names(&self, format: &str, called: &Path) -> Result<Names, ChainError> {
        let failed = |source| ChainError::Names {
            image: called.display().to_string(),
            source,
        };
        let (file, size) = self.open().map_err(|e| failed(e.into()))?;
        let mut read = |offset: u64, data: &mut [u8]| file.read_exact_at(data, offset);
        names(format, size, &mut read).map_err(failed)
    }
}

/// Leads to what is open, not to what has its name now.
fn descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The format that a file's first bytes claim.
fn probed(head: &[u8]) -> Option<&'static str> {
    const MARKS: [(usize, &[u8], &str); 8] = [
        (0, b"QFI\xfb", "qcow2"),
        (0, b"KDMV", "vmdk"),
        (0, b"COWD", "vmdk"),
        (0, b"# Disk DescriptorFile", "vmdk"),
        (0, b"vhdxfile", "vhdx"),
        (64, &0xbeda_107fu32.to_le_bytes(), "vdi"),
        (0, b"QED\0", "qed"),
        (0, b"conectix", "vhd"),
    ];
    MARKS
        .iter()
        .find(|(at, magic, _)| head.get(*at..).is_some_and(|rest| rest.starts_with(magic)))
        .map(|(_, _, format)| *format)
}

/// To QEMU, what has a colon before its first slash is an address or a description.
fn is_address(name: &Path) -> bool {
    let bytes = name.as_os_str().as_bytes();
    bytes
        .split(|b| *b == b'/')
        .next()
        .is_some_and(|start| start.contains(&b':'))
}

struct Resolver<'a> {
    rules: &'a Backing,
    dirs: Vec<PathBuf>,
    seen: BTreeSet<(u64, u64)>,
    links: Vec<Link>,
    /// Files of the chain as it was allowed.
    judged: BTreeSet<PathBuf>,
    write_once: bool,
}

impl Resolver<'_> {
    /// The file an image names, if it may be had. `above` is how the image was called: relative
    /// names are relative to where that is.
    fn file(&mut self, above: &Path, name: &Path) -> Result<(PathBuf, Place), ChainError> {
        let image = || above.display().to_string();
        if !self.rules.allowed {
            return Err(ChainError::NotAllowed {
                image: image(),
                name: name.display().to_string(),
            });
        }
        if is_address(name) {
            return Err(ChainError::NoPath {
                image: image(),
                name: name.display().to_string(),
            });
        }
        let called = above.parent().unwrap_or(Path::new("/")).join(name);
        let missing = |source| ChainError::Missing {
            image: image(),
            path: called.display().to_string(),
            source,
        };
        let place = Place::find(&called).map_err(missing)?;
        let path = &place.path;
        let judged = self.judged.contains(path);
        if !judged && !self.rules.unconfined && !self.dirs.iter().any(|dir| path.starts_with(dir)) {
            let dirs: Vec<String> = self.dirs.iter().map(|d| d.display().to_string()).collect();
            return Err(ChainError::Outside {
                image: image(),
                path: path.display().to_string(),
                dirs: dirs.join(", "),
            });
        }
        if !self.seen.insert(place.number) {
            return Err(ChainError::Loop {
                image: image(),
                path: path.display().to_string(),
            });
        }
        Ok((called, place))
    }

    /// True if a base is left to QEMU, as before there were rules.
    fn is_left_alone(&self, name: &str) -> bool {
        let line = format!("{UNJUDGED}:{name}");
        let known = self.rules.known.iter().flatten().any(|l| *l == line);
        known || (self.rules.unconfined && is_address(Path::new(name)))
    }

    /// Adds a file. The description of a base for QEMU holds its path as text.
    fn push(&mut self, above: &Path, link: Link) -> Result<(), ChainError> {
        let is_text = link.path.to_str().is_some_and(|path| !path.contains('\n'));
        if !is_text && link.role != Role::Extent {
            return Err(ChainError::NoPath {
                image: above.display().to_string(),
                name: link.path.display().to_string(),
            });
        }
        self.links.push(link);
        Ok(())
    }

    /// The chain that was found, if it is the one that was allowed.
    fn end(self, image: &Path) -> Result<Chain, ChainError> {
        let found = Chain {
            links: self.links,
            write_once: self.write_once,
            files: self.seen,
        };
        if found
            .text()
            .iter()
            .map(|line| line.len() + 1)
            .sum::<usize>()
            > TEXT_MAX
        {
            return Err(ChainError::Deep {
                image: image.display().to_string(),
            });
        }
        found.compared(image, self.rules)
    }

    /// The format of a base: as the image says, else as it was when it was allowed, else raw.
    fn format(
        &self,
        above: &Path,
        place: &Place,
        role_of_above: &str,
        said: Option<String>,
    ) -> Result<String, ChainError> {
        let path = &*place.path;
        let unknown = |format: &str| ChainError::Unknown {
            image: above.display().to_string(),
            path: path.display().to_string(),
            format: format.to_owned(),
        };
        if let Some(format) = said {
            return match crate::is_image_format(&format) {
                true => Ok(format),
                false => Err(unknown(&format)),
            };
        }
        let known = self.rules.known.iter().flatten().find_map(|line| {
            let (format, known) = line.split_once(':')?;
            (Path::new(known) == path && crate::is_image_format(format)).then(|| format.to_owned())
        });
        if let Some(format) = known {
            return Ok(format);
        }
        let missing = |source| ChainError::Missing {
            image: above.display().to_string(),
            path: path.display().to_string(),
            source,
        };
        // A VMDK's parent is a VMDK.
        if role_of_above == "vmdk" {
            return Ok("vmdk".to_owned());
        }
        let Some(format) = place.looks_like().map_err(missing)? else {
            return Ok("raw".to_owned());
        };
        // Before there were rules, QEMU looked at the content.
        if !self.rules.unconfined {
            return Err(ChainError::Format {
                image: above.display().to_string(),
                path: path.display().to_string(),
            });
        }
        match crate::is_image_format(format) {
            true => Ok(format.to_owned()),
            false => Err(unknown(format)),
        }
    }
}

impl Chain {
    /// Follows the names in an image, as far as that is allowed. Opens and reads; blocks.
    pub fn resolve(format: &str, image: &Path, rules: &Backing) -> Result<Chain, ChainError> {
        let mut dirs: Vec<PathBuf> = rules
            .dirs
            .iter()
            .filter_map(|dir| dir.canonicalize().ok())
            .collect();
        if rules.dirs.is_empty() {
            let canonical = image.canonicalize().ok();
            let beside = [image.parent(), canonical.as_deref().and_then(Path::parent)];
            dirs.extend(
                beside
                    .into_iter()
                    .flatten()
                    .filter_map(|d| d.canonicalize().ok()),
            );
            dirs.dedup();
        }
        let mut resolver = Resolver {
            rules,
            dirs,
            seen: BTreeSet::new(),
            links: Vec::new(),
            judged: (files_of(rules.known.as_deref().unwrap_or_default()).into_iter())
                .map(|(path, _)| path)
                .collect(),
            write_once: false,
        };
        let unread = |e: io::Error| ChainError::Names {
            image: image.display().to_string(),
            source: e.into(),
        };
        let top = Place::find(image).map_err(unread)?;
        resolver.seen.insert(top.number);
        resolver.write_once = format == "vmdk" && top.is_write_once().map_err(unread)?;
        let (mut format, mut called, mut place) = (format.to_owned(), image.to_owned(), top);
        for _ in 0..=DEPTH_MAX {
            let names = place.names(&format, &called)?;
            let parts = names
                .data
                .iter()
                .map(|name| (Role::Data, Path::new(name)))
                .chain((names.extents.iter()).map(|name| (Role::Extent, name.as_path())));
            // Those of an image below are only read.
            let is_top = resolver.links.is_empty();
            for (role, name) in parts {
                let (_, part) = resolver.file(&called, name)?;
                if is_top && names.sparse.contains(name) {
                    resolver.write_once |= part.is_write_once().map_err(unread)?;
                }
                let link = Link {
                    role,
                    format: "raw".to_owned(),
                    path: part.path,
                };
                resolver.push(&called, link)?;
            }
            let Some(name) = names.backing else {
                return resolver.end(image);
            };
            let unjudged = Link {
                role: Role::Unjudged,
                format: UNJUDGED.to_owned(),
                path: PathBuf::from(&name),
            };
            if resolver.is_left_alone(&name) {
                resolver.push(&called, unjudged)?;
                return resolver.end(image);
            }
            let (below, base) = resolver.file(&called, Path::new(&name))?;
            let next = match resolver.format(&called, &base, &format, names.backing_format) {
                Err(ChainError::Unknown { .. }) if rules.unconfined => {
                    resolver.push(&called, unjudged)?;
                    return resolver.end(image);
                }
                next => next?,
            };
            let link = Link {
                role: Role::Backing,
                format: next.clone(),
                path: base.path.clone(),
            };
            resolver.push(&called, link)?;
            (format, called, place) = (next, below, base);
        }
        Err(ChainError::Deep {
            image: image.display().to_string(),
        })
    }

    /// The chain, if it is the one that was allowed.
    fn compared(self, image: &Path, rules: &Backing) -> Result<Chain, ChainError> {
        let Some(known) = &rules.known else {
            return Ok(self);
        };
        let (known, found) = (unpacked(known), self.lines());
        if known == found {
            return Ok(self);
        }
        let place = known
            .iter()
            .zip(&found)
            .position(|(a, b)| a != b)
            .unwrap_or(known.len().min(found.len()));
        let none = || "nothing".to_owned();
        let (was, is) = (known.get(place).cloned(), found.get(place).cloned());
        Err(ChainError::Changed {
            image: image.display().to_string(),
            difference: format!(
                "at place {} was {}, and now is {}",
                place + 1,
                was.unwrap_or_else(none),
                is.unwrap_or_else(none)
            ),
        })
    }

    /// Lines as they are kept with a disk.
    pub fn text(&self) -> Vec<String> {
        packed(&self.lines())
    }

    /// A line for each file.
    fn lines(&self) -> Vec<String> {
        self.links.iter().map(Link::text).collect()
    }

    /// QEMU's description of an image over these files: `node` makes one of a format and a path that
    /// is only read or not. It says of every file that there is one, or none, so that QEMU asks no header.
    pub(crate) fn blockdev(
        &self,
        format: &str,
        path: &Path,
        read_only: bool,
        node: &dyn Fn(&str, &Path, bool) -> Value,
        file: &dyn Fn(&Path, bool) -> Value,
    ) -> Value {
        // From the bottom up: the files of each image stand before the one below it.
        let mut images: Vec<(&str, &Path, Option<&Path>)> = vec![(format, path, None)];
        let unjudged = self.links.last().is_some_and(|l| l.role == Role::Unjudged);
        for link in &self.links {
            match link.role {
                Role::Backing => images.push((&link.format, &link.path, None)),
                Role::Data => {
                    if let Some(image) = images.last_mut() {
                        image.2 = Some(&link.path);
                    }
                }
                // QEMU has no way to be told of them: it opens those of the descriptor, which are
                // the ones that were found there.
                Role::Extent | Role::Unjudged => {}
            }
        }
        let lowest = images.len() - 1;
        let mut below = Value::Null;
        for (depth, (format, path, data)) in images.into_iter().enumerate().rev() {
            let read_only = read_only || depth > 0;
            let mut image = node(format, path, read_only);
            // Left out, QEMU follows the header.
            let left_alone = unjudged && depth == lowest;
            if matches!(format, "qcow2" | "vmdk") && !left_alone {
                image["backing"] = below;
            }
            if let Some(data) = data {
                image["data-file"] = file(data, read_only);
            }
            below = image;
        }
        below
    }

    /// A file that process `pid`, which was told to open an image over these, has open besides: the
    /// image, or what a name leads to, was changed between our look and QEMU's.
    pub(crate) fn strangers(&self, pid: u32) -> io::Result<Option<PathBuf>> {
        if self.links.iter().any(|l| l.role == Role::Unjudged) {
            return Ok(None);
        }
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
            let Ok(entry) = entry else { continue };
            // Closed meanwhile.
            let Ok(meta) = std::fs::metadata(entry.path()) else {
                continue;
            };
            let kind = meta.file_type();
            if (kind.is_file() || kind.is_block_device()) && !self.files.contains(&number(&meta)) {
                let path = std::fs::read_link(entry.path()).unwrap_or_default();
                if !path.starts_with("/memfd:") {
                    return Ok(Some(path));
                }
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A qcow2 header, and nothing else, that names a raw or qcow2 base.
    fn overlay(path: &Path, base: &str, format: &str) {
        let mut image = vec![0u8; 65536];
        image[..4].copy_from_slice(b"QFI\xfb");
        image[4..8].copy_from_slice(&3u32.to_be_bytes());
        image[8..16].copy_from_slice(&4096u64.to_be_bytes());
        image[16..20].copy_from_slice(&(base.len() as u32).to_be_bytes());
        image[20..24].copy_from_slice(&16u32.to_be_bytes());
        image[100..104].copy_from_slice(&104u32.to_be_bytes());
        if !format.is_empty() {
            image[104..108].copy_from_slice(&0xE279_2ACAu32.to_be_bytes());
            image[108..112].copy_from_slice(&(format.len() as u32).to_be_bytes());
            image[112..112 + format.len()].copy_from_slice(format.as_bytes());
        }
        image[4096..4096 + base.len()].copy_from_slice(base.as_bytes());
        std::fs::write(path, image).unwrap();
    }

    fn allowed() -> Backing {
        Backing {
            allowed: true,
            ..Backing::default()
        }
    }

    #[test]
    fn vmdk_of_many_pieces_is_kept_short() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let (top, gbk) = (
            dir.join("disk.vmdk"),
            OsString::from_vec(b"\xd0\xe9.vmdk".to_vec()),
        );
        let mut names: Vec<PathBuf> = (1..=1036)
            .map(|n| dir.join(format!("disk-f{n:03}.vmdk")))
            .collect();
        names.extend([dir.join(&gbk), dir.join("other.vmdk")]);
        let mut descriptor = b"# Disk DescriptorFile\n".to_vec();
        for name in &names {
            std::fs::write(name, b"").unwrap();
            let file = name.file_name().unwrap().as_bytes();
            descriptor.extend([b"RW 1 FLAT \"", file, b"\" 0\n"].concat());
        }
        std::fs::write(&top, descriptor).unwrap();
        let chain = Chain::resolve("vmdk", &top, &allowed()).unwrap();
        let text = chain.text();
        assert_eq!(
            text,
            [
                format!("extents:1036:{}", names[0].display()),
                format!("extent%:{}/%D0%E9.vmdk", dir.display()),
                format!("extent:{}/other.vmdk", dir.display()),
            ]
        );
        let files: Vec<PathBuf> = files_of(&text).into_iter().map(|(path, _)| path).collect();
        assert_eq!(files, names);
        // As it is kept now, and as it was kept before runs had a line.
        assert!(is_same_chain(&text, &chain.lines()));
        for known in [text, chain.lines()] {
            let known = Backing {
                known: Some(known),
                ..allowed()
            };
            assert_eq!(Chain::resolve("vmdk", &top, &known).unwrap(), chain);
        }
        let mut other = chain.lines();
        other.swap(3, 4);
        let known = Backing {
            known: Some(other),
            ..allowed()
        };
        let changed = Chain::resolve("vmdk", &top, &known);
        assert!(
            matches!(changed, Err(ChainError::Changed { .. })),
            "{changed:?}"
        );
    }

    #[test]
    fn kept_text_from_anywhere_is_bounded() {
        let lines = |text: &str| files_of(&[text.to_owned()]).len();
        assert_eq!(lines("extents:3:/a-s9.vmdk"), 3);
        assert_eq!(lines("extents:99999999999:/a1"), names::NAMES_MAX);
        assert_eq!(lines("extents:2:/a999999999999999999999"), 1);
        for text in [
            "extents:2:/a",
            "extents::",
            "extents:x:/a1",
            "extent%:/a%F",
            "extent%:%zz",
        ] {
            assert!(lines(text) <= 1, "{text}");
        }
    }

    #[test]
    fn chains_end() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        overlay(&at("a"), "b", "qcow2");
        overlay(&at("b"), "a", "qcow2");
        let looped = Chain::resolve("qcow2", &at("a"), &allowed());
        assert!(matches!(looped, Err(ChainError::Loop { .. })), "{looped:?}");
        for n in 0..=DEPTH_MAX {
            overlay(&at(&n.to_string()), &(n + 1).to_string(), "qcow2");
        }
        std::fs::write(at(&(DEPTH_MAX + 1).to_string()), [0; 512]).unwrap();
        let deep = Chain::resolve("qcow2", &at("0"), &allowed());
        assert!(matches!(deep, Err(ChainError::Deep { .. })), "{deep:?}");
        assert_eq!(
            Chain::resolve("qcow2", &at("2"), &allowed())
                .unwrap()
                .links
                .len(),
            DEPTH_MAX - 1
        );
    }

    #[test]
    fn what_a_guest_wrote_decides_no_format() {
        let dir = tempfile::tempdir().unwrap();
        let (top, base) = (dir.path().join("top"), dir.path().join("base"));
        overlay(&top, "base", "");
        std::fs::write(&base, [0; 512]).unwrap();
        let chain = Chain::resolve("qcow2", &top, &allowed()).unwrap();
        assert_eq!(chain.links[0].format, "raw");
        // The guest of the base has written a header that names a file of the host.
        overlay(&base, "/etc/passwd", "raw");
        let fooled = Chain::resolve("qcow2", &top, &allowed());
        assert!(
            matches!(fooled, Err(ChainError::Format { .. })),
            "{fooled:?}"
        );
        // What was allowed once is known to be raw, and stays so.
        let known = Backing {
            known: Some(chain.text()),
            ..allowed()
        };
        assert_eq!(Chain::resolve("qcow2", &top, &known).unwrap(), chain);
    }

    /// What was served before there were rules is served on, but what it names must stay.
    #[test]
    fn an_older_disks_addresses_are_left_to_qemu() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        let node = |format: &str, _: &Path, _: bool| serde_json::json!({ "driver": format });
        let file = |_: &Path, _: bool| Value::Null;
        let old = Backing {
            unconfined: true,
            ..allowed()
        };
        for (name, format) in [("json:{\"driver\":\"null-co\"}", "raw"), ("base", "bochs")] {
            overlay(&top, name, format);
            std::fs::write(dir.path().join("base"), [0; 512]).unwrap();
            assert!(Chain::resolve("qcow2", &top, &allowed()).is_err());
            let chain = Chain::resolve("qcow2", &top, &old).unwrap();
            assert_eq!(chain.text(), [format!("unjudged:{name}")]);
            assert!(files_of(&chain.text()).is_empty());
            let disk = chain.blockdev("qcow2", &top, false, &node, &file);
            assert!(disk.get("backing").is_none(), "{disk}");
            let known = Backing {
                known: Some(chain.text()),
                ..allowed()
            };
            let again = Chain::resolve("qcow2", &top, &known).unwrap();
            assert_eq!(again.links, chain.links);
            overlay(&top, "json:{}", "raw");
            assert!(Chain::resolve("qcow2", &top, &known).is_err());
        }
    }

    /// What a name leads to may be changed by who may write in its directory, at any moment.
    #[test]
    fn what_was_found_stays_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let (name, base) = (dir.path().join("name"), dir.path().join("base"));
        std::fs::write(&base, [1; 512]).unwrap();
        std::os::unix::fs::symlink(&base, &name).unwrap();
        let found = Place::find(&name).unwrap();
        std::fs::remove_file(&name).unwrap();
        overlay(&name, "/etc/passwd", "raw");
        assert_eq!(found.path, base.canonicalize().unwrap());
        assert_eq!(found.open().unwrap().1, 512);
        assert_eq!(found.looks_like().unwrap(), None);
        assert!(Place::find(dir.path()).is_err());
    }

    /// Between our look and QEMU's opening the base was replaced by a way to somebody else's file.
    #[test]
    fn a_base_that_leads_elsewhere_by_now_is_a_stranger() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (top, base, secret) = (at("top"), at("base"), at("secret"));
        overlay(&top, "base", "raw");
        std::fs::write(&base, [0; 512]).unwrap();
        std::fs::write(&secret, [7; 512]).unwrap();
        let chain = Chain::resolve("qcow2", &top, &allowed()).unwrap();
        // A child goes on before what it shall not have of its parent, other tests' files among it, is closed: that is
        // waited for.
        let says = |path: &Path, wanted: Option<PathBuf>| {
            let mut child = std::process::Command::new("sleep")
                .arg("60")
                .stdin(File::open(path).unwrap())
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::null())
                .spawn()
                .unwrap();
            let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
            let mut stranger = chain.strangers(child.id()).unwrap();
            while stranger != wanted && std::time::Instant::now() < end {
                std::thread::yield_now();
                stranger = chain.strangers(child.id()).unwrap();
            }
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(stranger, wanted);
        };
        says(&base, None);
        says(&top, None);
        std::fs::remove_file(&base).unwrap();
        std::os::unix::fs::symlink(&secret, &base).unwrap();
        says(&base, Some(secret.canonicalize().unwrap()));
    }

    #[test]
    fn every_node_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (top, base) = (dir.path().join("top"), dir.path().join("base"));
        overlay(&top, "base", "raw");
        std::fs::write(&base, [0; 512]).unwrap();
        let chain = Chain::resolve("qcow2", &top, &allowed()).unwrap();
        let file = |path: &Path, ro: bool| serde_json::json!({ "filename": path, "ro": ro });
        let node = |format: &str, path: &Path, ro: bool| serde_json::json!({ "driver": format, "file": file(path, ro) });
        let disk = chain.blockdev("qcow2", &top, false, &node, &file);
        assert_eq!(disk["file"]["ro"], false);
        assert_eq!(disk["backing"]["driver"], "raw");
        assert_eq!(disk["backing"]["file"]["ro"], true);
        assert_eq!(
            files_of(&chain.text()),
            [(base.canonicalize().unwrap(), false)]
        );
    }
}
