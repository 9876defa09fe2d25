//! What a pool remembers of one disk: its origin, its settings, and what the origin looked
//! like when it was last seen.
//!
//! Settings are added more often than any other structure changes, and an older version that
//! rewrites the registry must not lose what a newer one put there. So a disk is a list of
//! tagged fields: unknown ones are carried along, except those marked critical, which an older
//! version must refuse.

use crate::error::FormatError;
use crate::mirror::MirrorStamps;
use uuid::Uuid;

/// A number no disk gets: log entries that say nothing about any disk carry it.
pub const NO_DISK: u16 = u16::MAX;
/// The largest number of a disk: the index keeps it in 15 bits.
pub const DISK_ID_MAX: u16 = 0x7FFF;
/// Longest disk name, in bytes.
pub const NAME_MAX: usize = 64;
/// Longest origin description, in bytes.
pub const ORIGIN_MAX: usize = 4096;
/// Most bytes of the names of the files below an image, one line break after each but the last.
pub const CHAIN_MAX: usize = 32 << 10;
/// Most bytes of what identifies an origin's block device.
pub const DEVICE_MAX: usize = 512;
/// Most fields of a disk, known and unknown.
pub const FIELDS_MAX: usize = 64;
/// Field tags with this bit must be understood by whoever reads the disk.
pub const CRITICAL: u16 = 0x8000;

const WHAT: &str = "disk record";
const FIELD_HEADER: usize = 4;

/// Field tags. Never reuse one.
mod tag {
    pub const ID: u16 = 1;
    pub const NAME: u16 = 2;
    pub const ORIGIN: u16 = 3;
    pub const SIZE: u16 = 4;
    pub const MODE: u16 = 5;
    pub const BLOCK_SIZE: u16 = 6;
    pub const MIN_BYTES: u16 = 7;
    pub const MAX_BYTES: u16 = 8;
    pub const SEQ_CUTOFF: u16 = 9;
    pub const READ_ONLY: u16 = 10;
    pub const SINCE_SEQ: u16 = 11;
    pub const SERIAL: u16 = 12;
    pub const ORIGIN_IDENTITY: u16 = 13;
    pub const CLEAN_DETACH: u16 = 14;
    pub const AUTO: u16 = 15;
    pub const ORIGIN_TIMEOUT: u16 = 16;
    pub const RULES: u16 = 17;
    pub const SOLE_USER: u16 = 18;
    pub const ALLOW_BACKING: u16 = 19;
    pub const CHAIN: u16 = 20;
    pub const CLIENTS: u16 = 21;
    /// An older version would destage what waits, over what another host wrote since.
    pub const FENCED_AT: u16 = super::CRITICAL | 22;
    /// An older version would take the origin for a file's name.
    pub const DATASTORE: u16 = super::CRITICAL | 23;
    /// An older version would read and write one leg as if it were all.
    pub const MIRROR: u16 = super::CRITICAL | 24;
    /// An older version would look for an origin, and drop what nobody else has.
    pub const HOME: u16 = super::CRITICAL | 25;
    pub const MAX_AGE: u16 = 26;
    /// An older version caches the disk as any other.
    pub const PIN: u16 = 27;
    /// An older version compares little with the origin.
    pub const ON_START: u16 = 28;
    pub const DEVICE: u16 = 29;
    /// An older version caches the disk as any other.
    pub const HOLD: u16 = 30;
    /// An older version would serve zeros where a crash took what was written.
    pub const VOID: u16 = super::CRITICAL | 31;
    /// The last number this version knows.
    pub const LAST: u16 = 31;
}

/// How a disk is cached.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Writes complete on flash and reach the origin later.
    #[default]
    WriteBack = 1,
    /// Writes complete on the origin; the flash copy is renewed.
    WriteThrough = 2,
    /// Reads are cached; writes go to the origin and drop the cached copy.
    WriteAround = 3,
    /// Pass-through.
    Off = 4,
    /// As write-back, and what reaches the origin keeps the order of the guest's flushes. An older version
    /// does not know it and refuses the pool.
    WriteBackOrdered = 5,
}

/// Where the data of a disk lives in the end.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Home {
    /// On its origin.
    #[default]
    Origin = 0,
    /// On flash alone.
    Flash = 1,
    /// The same, and a crash leaves nothing of it.
    Scratch = 2,
    /// On its origin, which it was given while it lived on flash, and which does not have everything yet. An older version
    /// refuses the pool.
    Moving = 3,
}

/// What becomes of the clean copies of a disk at a start, where its origin may have changed and does not show it.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStart {
    /// They are used when a sample of them was compared with the origin.
    #[default]
    Sample = 0,
    /// They are dropped.
    Drop = 1,
    /// They are used at once.
    Keep = 2,
}

/// What an origin looked like when its disk was last detached: if it differs at the next
/// attach, somebody changed the origin behind the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OriginIdentity {
    /// Bytes.
    pub size: u64,
    /// Last modification, nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Last inode change, nanoseconds since 1970.
    pub ctime_ns: i64,
    /// File system's device number.
    pub dev: u64,
    /// Inode number.
    pub inode: u64,
}

/// One disk of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskRecord {
    /// Number in the pool; 1 to [`DISK_ID_MAX`], never given twice while the log may hold old records of it
    /// without [`since_seq`](Self::since_seq) being raised.
    pub id: u16,
    /// Unique in the pool; see [`check_name`].
    pub name: String,
    /// Where the data really lives, as the origin layer spells it; at most [`ORIGIN_MAX`] bytes.
    pub origin: String,
    /// Bytes.
    pub size: u64,
    /// How it is cached.
    pub mode: CacheMode,
    /// Unit of filling in bytes, a power of two from 4 KiB to 1 MiB; 0 means `auto`.
    pub block_size: u32,
    /// Bytes of flash kept for this disk even under pressure.
    pub min_bytes: u64,
    /// Most bytes of flash it may hold; 0 means no limit.
    pub max_bytes: u64,
    /// Sequential reads beyond this many bytes are not cached; 0 turns that off.
    pub seq_cutoff: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Log records of this id in segments numbered below this are void.
    pub since_seq: u64,
    /// Shown to guests as the disk's serial number.
    pub serial: Uuid,
    /// The origin at the last detach, if it was recorded.
    pub origin_identity: Option<OriginIdentity>,
    /// The disk was last detached cleanly, and `origin_identity` is of that moment.
    pub clean_detach: bool,
    /// Its share of flash follows the advice, within `min_bytes` and `max_bytes`.
    pub auto: bool,
    /// How long requests wait for an origin's server that is gone before they fail, in
    /// milliseconds; 0 means the default.
    pub origin_timeout_ms: u32,
    /// Which rules of admission the disk was added under; 0: before there were any. A later
    /// version that tightens them keeps serving what an earlier one took.
    pub rules: u8,
    /// The user said that nobody but this pool writes the origin, where that cannot be known.
    pub sole_user: bool,
    /// The image may name other host files, those of [`chain`](Self::chain).
    pub allow_backing: bool,
    /// The host files below the origin's image, from the top, as they were when they were
    /// allowed; together at most [`CHAIN_MAX`] bytes, none with a line break in it.
    pub chain: Vec<String>,
    /// Most processes that may be clients at once; 0 means no limit.
    pub clients: u32,
    /// When the origin's server shut this pool out, seconds since 1970; 0 if it has not. Such a
    /// disk is not served and nothing of it is destaged until the user decides.
    pub fenced_at: u64,
    /// The datastore whose file this is; empty for a disk of its own. The origin then is what the
    /// file system calls the file, and the size no more than an upper bound of the file's.
    pub datastore: String,
    /// Which legs of a mirrored origin hold the disk; `None` for an origin that is no mirror.
    pub mirror: Option<MirrorStamps>,
    /// Where its data lives. The origin of a disk without one is a name and nothing else.
    pub home: Home,
    /// If it is ordered: how far behind its origin may be before its writes wait, in milliseconds; 0 means no
    /// limit.
    pub max_age_ms: u32,
    /// All of it is to be on flash, and stay there.
    pub pin: bool,
    /// What becomes of clean copies at a start, where the origin does not show whether it changed.
    pub on_start: OnStart,
    /// What identified the origin's block device when it was attached last, at most [`DEVICE_MAX`] bytes; empty if
    /// nothing does.
    pub device: String,
    /// Its origin has every write before it is answered, whatever its mode.
    pub hold: bool,
    /// A crash has left nothing of the scratch disk: what was not written since cannot be read.
    pub void: bool,
    /// Fields of newer versions, carried along: tag and bytes.
    pub unknown: Vec<(u16, Vec<u8>)>,
}

/// Checks a disk's name: 1 to 64 of `A-Z a-z 0-9 . _ -`, not starting with `-` or `.`, so that
/// it is a safe file name, command-line argument and part of a URL. Says why if it will not do.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    let fault = if name.is_empty() {
        "it is empty"
    } else if name.len() > NAME_MAX {
        "it is longer than 64 characters"
    } else if name.starts_with(['-', '.']) {
        "it starts with '-' or '.'"
    } else if !name
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    {
        "only letters, digits, '.', '_' and '-' are allowed"
    } else {
        return Ok(());
    };
    Err(fault)
}

impl DiskRecord {
    /// True if it is a file of a datastore, and no disk that people know.
    pub fn is_file(&self) -> bool {
        !self.datastore.is_empty()
    }

    /// True if nothing of it is on an origin.
    pub fn is_flash_only(&self) -> bool {
        matches!(self.home, Home::Flash | Home::Scratch)
    }

    /// Bytes of flash that are promised to it: all that it has, if it lives there, or did and its origin does not have
    /// everything yet.
    pub fn promised_bytes(&self) -> u64 {
        match self.home {
            Home::Origin => 0,
            _ => self.size,
        }
    }

    /// Bytes of flash that its owner wants kept for it: its minimum, or all of it if it is pinned.
    pub fn kept_bytes(&self) -> u64 {
        match self.pin && self.home == Home::Origin {
            true => self
                .size
                .div_ceil(4096)
                .saturating_mul(4096)
                .max(self.min_bytes),
            false => self.min_bytes,
        }
    }

    /// Checks what must hold for a record, whoever made it.
    pub fn check(&self) -> Result<(), FormatError> {
        check_name(&self.name).map_err(|fault| {
            FormatError::wrong("disk name", format!("{:?}: {fault}", self.name))
        })?;
        let fault = if self.id == 0 {
            "its number is 0"
        } else if self.id > DISK_ID_MAX {
            "its number is above 32767"
        } else if self.origin.is_empty() {
            "it has no origin"
        } else if self.origin.len() > ORIGIN_MAX {
            "its origin is longer than 4096 bytes"
        } else if self.device.len() > DEVICE_MAX {
            "what identifies its origin is longer than 512 bytes"
        } else if self.block_size != 0
            && !(self.block_size.is_power_of_two() && (4096..=1 << 20).contains(&self.block_size))
        {
            "its cache block size is no power of two from 4 KiB to 1 MiB"
        } else if self.max_bytes != 0 && self.min_bytes > self.max_bytes {
            "its reserved flash is more than its limit"
        } else if self
            .chain
            .iter()
            .any(|name| name.is_empty() || name.contains('\n'))
        {
            "the name of a file below its image is empty or has a line break in it"
        } else if self.chain.iter().map(|name| name.len() + 1).sum::<usize>() > CHAIN_MAX {
            "the names of the files below its image are longer than 32 KiB"
        } else if !self.datastore.is_empty() && check_name(&self.datastore).is_err() {
            "the name of its datastore is none"
        } else if self.unknown.len() > FIELDS_MAX - usize::from(tag::LAST) {
            "it has too many unknown fields"
        } else if self
            .unknown
            .iter()
            .any(|(tag, _)| known(*tag) || tag & CRITICAL != 0)
        {
            "a field carried along has the tag of a known or critical one"
        } else if self
            .unknown
            .iter()
            .any(|(_, bytes)| bytes.len() > usize::from(u16::MAX))
        {
            "an unknown field is longer than 65535 bytes"
        } else {
            return Ok(());
        };
        Err(FormatError::wrong(
            WHAT,
            format!("disk {:?} ({}): {fault}", self.name, self.id),
        ))
    }

    /// Appends the record's fields.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), FormatError> {
        self.check()?;
        field(out, tag::ID, &self.id.to_le_bytes());
        field(out, tag::NAME, self.name.as_bytes());
        field(out, tag::ORIGIN, self.origin.as_bytes());
        field(out, tag::SIZE, &self.size.to_le_bytes());
        field(out, tag::MODE, &[self.mode as u8]);
        field(out, tag::BLOCK_SIZE, &self.block_size.to_le_bytes());
        field(out, tag::MIN_BYTES, &self.min_bytes.to_le_bytes());
        field(out, tag::MAX_BYTES, &self.max_bytes.to_le_bytes());
        field(out, tag::SEQ_CUTOFF, &self.seq_cutoff.to_le_bytes());
        field(out, tag::READ_ONLY, &[u8::from(self.read_only)]);
        field(out, tag::SINCE_SEQ, &self.since_seq.to_le_bytes());
        field(out, tag::SERIAL, self.serial.as_bytes());
        if let Some(id) = &self.origin_identity {
            let mut bytes = [0u8; 40];
            let words = [
                id.size,
                id.mtime_ns as u64,
                id.ctime_ns as u64,
                id.dev,
                id.inode,
            ];
            for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
                *place = word.to_le_bytes();
            }
            field(out, tag::ORIGIN_IDENTITY, &bytes);
        }
        field(out, tag::CLEAN_DETACH, &[u8::from(self.clean_detach)]);
        if self.auto {
            field(out, tag::AUTO, &[1]);
        }
        if self.origin_timeout_ms != 0 {
            field(
                out,
                tag::ORIGIN_TIMEOUT,
                &self.origin_timeout_ms.to_le_bytes(),
            );
        }
        for (tag, is_set) in [
            (tag::SOLE_USER, self.sole_user),
            (tag::ALLOW_BACKING, self.allow_backing),
        ] {
            if is_set {
                field(out, tag, &[1]);
            }
        }
        if self.rules != 0 {
            field(out, tag::RULES, &[self.rules]);
        }
        if !self.chain.is_empty() {
            field(out, tag::CHAIN, self.chain.join("\n").as_bytes());
        }
        if self.clients != 0 {
            field(out, tag::CLIENTS, &self.clients.to_le_bytes());
        }
        if self.fenced_at != 0 {
            field(out, tag::FENCED_AT, &self.fenced_at.to_le_bytes());
        }
        if !self.datastore.is_empty() {
            field(out, tag::DATASTORE, self.datastore.as_bytes());
        }
        if let Some(mirror) = &self.mirror {
            field(out, tag::MIRROR, &mirror.encode()?);
        }
        if self.home != Home::Origin {
            field(out, tag::HOME, &[self.home as u8]);
        }
        if self.max_age_ms != 0 {
            field(out, tag::MAX_AGE, &self.max_age_ms.to_le_bytes());
        }
        if self.pin {
            field(out, tag::PIN, &[1]);
        }
        if self.on_start != OnStart::Sample {
            field(out, tag::ON_START, &[self.on_start as u8]);
        }
        if !self.device.is_empty() {
            field(out, tag::DEVICE, self.device.as_bytes());
        }
        if self.hold {
            field(out, tag::HOLD, &[1]);
        }
        if self.void {
            field(out, tag::VOID, &[1]);
        }
        for (tag, bytes) in &self.unknown {
            field(out, *tag, bytes);
        }
        Ok(())
    }

    /// Reads a record from exactly its fields.
    pub(crate) fn decode(mut rest: &[u8]) -> Result<DiskRecord, FormatError> {
        let mut disk = DiskRecord::default();
        let mut seen = 0u64;
        let mut fields = 0usize;
        while !rest.is_empty() {
            let (tag, bytes, after) = split_field(rest)?;
            rest = after;
            fields += 1;
            if fields > FIELDS_MAX {
                return Err(FormatError::damaged(WHAT, "it has more than 64 fields"));
            }
            let number = tag & !CRITICAL;
            if known(number) {
                let bit = 1u64 << number;
                if seen & bit != 0 {
                    return Err(FormatError::wrong(WHAT, format!("field {tag} comes twice")));
                }
                seen |= bit;
            }
            disk.take(tag, bytes)?;
        }
        let required = [tag::ID, tag::NAME, tag::ORIGIN, tag::SIZE, tag::MODE];
        if let Some(missing) = required.iter().find(|tag| seen & (1u64 << **tag) == 0) {
            return Err(FormatError::wrong(
                WHAT,
                format!("field {missing} is missing"),
            ));
        }
        disk.check()?;
        Ok(disk)
    }

    fn take(&mut self, tag: u16, bytes: &[u8]) -> Result<(), FormatError> {
        match tag {
            tag::ID => self.id = u16::from_le_bytes(exact(tag, bytes)?),
            tag::NAME => self.name = text(tag, bytes)?,
            tag::ORIGIN => self.origin = text(tag, bytes)?,
            tag::SIZE => self.size = u64::from_le_bytes(exact(tag, bytes)?),
            tag::MODE => {
                let [raw] = exact(tag, bytes)?;
                self.mode = match raw {
                    1 => CacheMode::WriteBack,
                    2 => CacheMode::WriteThrough,
                    3 => CacheMode::WriteAround,
                    4 => CacheMode::Off,
                    5 => CacheMode::WriteBackOrdered,
                    _ => return Err(newer(format!("cache mode {raw}"))),
                };
            }
            tag::BLOCK_SIZE => self.block_size = u32::from_le_bytes(exact(tag, bytes)?),
            tag::MIN_BYTES => self.min_bytes = u64::from_le_bytes(exact(tag, bytes)?),
            tag::MAX_BYTES => self.max_bytes = u64::from_le_bytes(exact(tag, bytes)?),
            tag::SEQ_CUTOFF => self.seq_cutoff = u64::from_le_bytes(exact(tag, bytes)?),
            tag::READ_ONLY => self.read_only = flag(tag, bytes)?,
            tag::SINCE_SEQ => self.since_seq = u64::from_le_bytes(exact(tag, bytes)?),
            tag::SERIAL => self.serial = Uuid::from_bytes(exact(tag, bytes)?),
            tag::ORIGIN_IDENTITY => {
                let raw: [u8; 40] = exact(tag, bytes)?;
                let word = |at| u64::from_le_bytes(crate::wire::array_at(&raw, at));
                self.origin_identity = Some(OriginIdentity {
                    size: word(0),
                    mtime_ns: word(8) as i64,
                    ctime_ns: word(16) as i64,
                    dev: word(24),
                    inode: word(32),
                });
            }
            tag::CLEAN_DETACH => self.clean_detach = flag(tag, bytes)?,
            tag::AUTO => self.auto = flag(tag, bytes)?,
            tag::ORIGIN_TIMEOUT => {
                self.origin_timeout_ms = u32::from_le_bytes(exact(tag, bytes)?);
            }
            tag::RULES => [self.rules] = exact(tag, bytes)?,
            tag::SOLE_USER => self.sole_user = flag(tag, bytes)?,
            tag::ALLOW_BACKING => self.allow_backing = flag(tag, bytes)?,
            tag::CHAIN => self.chain = text(tag, bytes)?.split('\n').map(str::to_owned).collect(),
            tag::CLIENTS => self.clients = u32::from_le_bytes(exact(tag, bytes)?),
            tag::FENCED_AT => self.fenced_at = u64::from_le_bytes(exact(tag, bytes)?),
            tag::PIN => self.pin = flag(tag, bytes)?,
            tag::HOLD => self.hold = flag(tag, bytes)?,
            tag::VOID => self.void = flag(tag, bytes)?,
            tag::MAX_AGE => self.max_age_ms = u32::from_le_bytes(exact(tag, bytes)?),
            tag::ON_START => {
                let [raw] = exact(tag, bytes)?;
                self.on_start = match raw {
                    0 => OnStart::Sample,
                    1 => OnStart::Drop,
                    2 => OnStart::Keep,
                    _ => return Err(newer(format!("what happens at a start: {raw}"))),
                };
            }
            tag::DEVICE => self.device = text(tag, bytes)?,
            tag::DATASTORE => self.datastore = text(tag, bytes)?,
            tag::MIRROR => self.mirror = Some(MirrorStamps::decode(bytes)?),
            tag::HOME => {
                let [raw] = exact(tag, bytes)?;
                self.home = match raw {
                    0 => Home::Origin,
                    1 => Home::Flash,
                    2 => Home::Scratch,
                    3 => Home::Moving,
                    _ => return Err(newer(format!("home {raw} of a disk"))),
                };
            }
            tag if tag & CRITICAL != 0 => return Err(newer(format!("disk setting {tag:#06x}"))),
            tag => self.unknown.push((tag, bytes.to_vec())),
        }
        Ok(())
    }
}

/// True for tags this version reads itself.
fn known(tag: u16) -> bool {
    (tag::ID..=tag::LAST).contains(&tag)
}

fn newer(feature: String) -> FormatError {
    FormatError::Newer {
        what: WHAT,
        feature,
    }
}

pub(crate) fn field(out: &mut Vec<u8>, tag: u16, bytes: &[u8]) {
    out.extend_from_slice(&tag.to_le_bytes());
    out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    out.extend_from_slice(bytes);
}

pub(crate) fn split_field(rest: &[u8]) -> Result<(u16, &[u8], &[u8]), FormatError> {
    let short = || FormatError::damaged(WHAT, "a field is cut short");
    let (header, rest) = rest.split_first_chunk::<FIELD_HEADER>().ok_or_else(short)?;
    let tag = u16::from_le_bytes([header[0], header[1]]);
    let len = usize::from(u16::from_le_bytes([header[2], header[3]]));
    let (bytes, rest) = rest.split_at_checked(len).ok_or_else(short)?;
    Ok((tag, bytes, rest))
}

fn exact<const N: usize>(tag: u16, bytes: &[u8]) -> Result<[u8; N], FormatError> {
    bytes.try_into().map_err(|_| {
        FormatError::wrong(
            WHAT,
            format!("field {tag} has {} bytes, not {N}", bytes.len()),
        )
    })
}

fn flag(tag: u16, bytes: &[u8]) -> Result<bool, FormatError> {
    match exact(tag, bytes)? {
        [0] => Ok(false),
        [1] => Ok(true),
        [other] => Err(FormatError::wrong(
            WHAT,
            format!("field {tag} is {other}, neither 0 nor 1"),
        )),
    }
}

fn text(tag: u16, bytes: &[u8]) -> Result<String, FormatError> {
    String::from_utf8(bytes.to_vec())
        .map_err(|_| FormatError::wrong(WHAT, format!("field {tag} is not UTF-8")))
}
