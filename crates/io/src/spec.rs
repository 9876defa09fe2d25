//! How an origin is written on a command line or in a config file.
//!
//! `PATH` or `file:PATH` is a file or block device (the second says that its raw bytes are meant, even
//! if they look like an image of another format); what starts with another scheme (`nbd://…`,
//! `qcow2:PATH`) is kept as it is for somebody who knows it. Wrappers before it make it slow or
//! faulty, for demos, benchmarks and tests, and may be stacked: `model-hdd:PATH`,
//! `model-hdd=NAME:PATH` (all origins of that NAME lie on one modelled drive),
//! `model-latency=8ms:PATH`, `fault=eio-read:PATH`, `fault=eio-write@1M+64K:PATH`.

use crate::device::Device;
use crate::fault::{FaultKind, FaultRule};
use crate::file::{BlockFile, OpenError, OpenMode};
use crate::model::HddParams;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use hearth_fault::Fault;

/// Longest latency a spec may ask for: one minute. More is a typing error.
const LATENCY_MAX_NS: u64 = 60_000_000_000;

/// Longest name of a shared drive.
const DRIVE_NAME_MAX: usize = 32;

/// Which modelled hard disk an origin lies on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Drive {
    /// One of its own.
    Own,
    /// One it shares with all origins that give this name: one arm serves them all.
    Shared(String),
}

/// Where an origin's data is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file or block device.
    File(PathBuf),
    /// Something with another scheme.
    Other {
        /// What stands before the colon, in lower case.
        scheme: String,
        /// What stands behind it, as it was written.
        rest: String,
    },
}

/// Longest scheme.
const SCHEME_MAX: usize = 16;

/// What an origin spec says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginSpec {
    /// Where the data is.
    pub source: Source,
    /// Written as `file:PATH`: its raw bytes are meant, whatever they look like.
    pub raw_bytes: bool,
    /// Behaves like a modelled hard disk.
    pub hdd: Option<Drive>,
    /// Completes nothing sooner than this many nanoseconds; 0: as fast as it is.
    pub latency_ns: u64,
    /// Failures armed from the start.
    pub faults: Vec<FaultRule>,
}

/// Why an origin spec was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.fault())]
pub enum SpecError {
    /// No path.
    NoPath(String),
    /// A name of a drive that is none.
    Drive(String),
    /// A scheme where only a path will do.
    NotFile(String),
    /// A latency that is none.
    Latency(String),
    /// A fault that is none.
    Fault(String),
}

impl SpecError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            SpecError::NoPath(text) => Fault::new(
                format!("origin \"{text}\" names no path"),
                "write PATH, file:PATH, model-hdd:PATH or model-latency=8ms:PATH",
            ),
            SpecError::Drive(name) => Fault::new(
                format!("\"{name}\" is not a name for a modelled drive"),
                "write 1 to 32 letters, digits, - or _",
            ),
            SpecError::NotFile(scheme) => Fault::new(
                format!("\"{scheme}:\" is not a file"),
                "give the path of one: a modelled disk needs a file underneath",
            ),
            SpecError::Latency(text) => Fault::new(
                format!("\"{text}\" is not a latency"),
                "write a number with us, ms or s, up to 60s, such as 8ms",
            ),
            SpecError::Fault(text) => Fault::new(
                format!("\"{text}\" is not a fault"),
                "write eio-read, eio-write, eio-flush or eio-all, and @OFFSET+LENGTH for a range",
            ),
        }
    }
}

/// Why an origin could not be opened from its spec.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum OpenSpecError {
    /// The file or device.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It is no file.
    NotFile(String),
    /// The thread of a modelled disk.
    Thread(io::Error),
}

impl OpenSpecError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            OpenSpecError::Open(e) => e.fault(),
            OpenSpecError::NotFile(scheme) => Fault::new(
                format!("\"{scheme}:\" is not a file"),
                "give the path of a file or block device",
            ),
            OpenSpecError::Thread(e) => Fault::new(
                format!("cannot start the thread of the modelled disk: {e}"),
                "check the limit on processes",
            ),
        }
    }
}

impl FromStr for OriginSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<OriginSpec, SpecError> {
        let mut spec = OriginSpec {
            source: Source::File(PathBuf::new()),
            raw_bytes: false,
            hdd: None,
            latency_ns: 0,
            faults: Vec::new(),
        };
        let mut rest = text;
        loop {
            if let Some(tail) = rest.strip_prefix("model-hdd:") {
                spec.hdd = Some(Drive::Own);
                rest = tail;
            } else if let Some((name, tail)) = option(rest, "model-hdd=") {
                let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
                if name.is_empty() || name.len() > DRIVE_NAME_MAX || !name.chars().all(plain) {
                    return Err(SpecError::Drive(name.to_owned()));
                }
                spec.hdd = Some(Drive::Shared(name.to_owned()));
                rest = tail;
            } else if let Some((value, tail)) = option(rest, "model-latency=") {
                spec.latency_ns =
                    latency(value).ok_or_else(|| SpecError::Latency(value.to_owned()))?;
                rest = tail;
            } else if let Some((value, tail)) = option(rest, "fault=") {
                spec.faults
                    .push(fault(value).ok_or_else(|| SpecError::Fault(value.to_owned()))?);
                rest = tail;
            } else {
                break;
            }
        }
        spec.source = source(rest);
        spec.raw_bytes = rest.starts_with("file:");
        match &spec.source {
            Source::File(path) if path.as_os_str().is_empty() => {
                Err(SpecError::NoPath(text.to_owned()))
            }
            Source::Other { scheme, .. } if spec.hdd.is_some() => {
                Err(SpecError::NotFile(scheme.clone()))
            }
            _ => Ok(spec),
        }
    }
}

fn source(text: &str) -> Source {
    match text.split_once(':') {
        Some(("file", path)) => Source::File(path.into()),
        Some((scheme, rest)) if is_scheme(scheme) => Source::Other {
            scheme: scheme.to_ascii_lowercase(),
            rest: rest.to_owned(),
        },
        _ => Source::File(text.into()),
    }
}

/// True for what may be a URI's scheme (RFC 3986, 3.1). A single letter is none.
fn is_scheme(text: &str) -> bool {
    (2..=SCHEME_MAX).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
}

/// `key` + value + `:` + the rest.
fn option<'a>(text: &'a str, key: &str) -> Option<(&'a str, &'a str)> {
    text.strip_prefix(key)?.split_once(':')
}

fn latency(text: &str) -> Option<u64> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit_ns = match unit {
        "us" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        _ => return None,
    };
    let ns = number.parse::<f64>().ok()? * unit_ns;
    (ns >= 1.0 && ns <= LATENCY_MAX_NS as f64).then_some(ns as u64)
}

fn fault(text: &str) -> Option<FaultRule> {
    let (kind, range) = text
        .split_once('@')
        .map_or((text, None), |(k, r)| (k, Some(r)));
    let mut rule = FaultRule::eio(match kind {
        "eio-read" => FaultKind::Read,
        "eio-write" => FaultKind::Write,
        "eio-flush" => FaultKind::Flush,
        "eio-all" => FaultKind::All,
        _ => return None,
    });
    if let Some((offset, len)) = range.map(|r| r.split_once('+')).unwrap_or(Some(("0", ""))) {
        rule.offset = bytes(offset)?;
        rule.len = if range.is_some() {
            bytes(len)?
        } else {
            u64::MAX
        };
        return Some(rule);
    }
    None
}

fn bytes(text: &str) -> Option<u64> {
    let (number, shift) = match text.char_indices().last()? {
        (i, 'K') => (&text[..i], 10),
        (i, 'M') => (&text[..i], 20),
        (i, 'G') => (&text[..i], 30),
        _ => (text, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

impl OriginSpec {
    /// A plain file or block device.
    pub fn file(path: impl Into<PathBuf>) -> OriginSpec {
        OriginSpec {
            source: Source::File(path.into()),
            raw_bytes: false,
            hdd: None,
            latency_ns: 0,
            faults: Vec::new(),
        }
    }

    /// The path, if it is one.
    pub fn path(&self) -> Option<&Path> {
        match &self.source {
            Source::File(path) => Some(path),
            Source::Other { .. } => None,
        }
    }

    /// Opens the file the spec names. A modelled disk starts a thread.
    pub fn open(&self, mode: OpenMode) -> Result<Device, OpenSpecError> {
        match &self.source {
            Source::File(path) => self.wrap(Device::new(BlockFile::open(path, mode)?)),
            Source::Other { scheme, .. } => Err(OpenSpecError::NotFile(scheme.clone())),
        }
    }

    /// Makes a device that was opened otherwise as slow and faulty as the spec says.
    pub fn wrap(&self, device: Device) -> Result<Device, OpenSpecError> {
        let mut device = device.with_latency(self.latency_ns);
        if let Some(drive) = &self.hdd {
            device = device
                .with_hdd(drive, HddParams::default())
                .map_err(OpenSpecError::Thread)?;
        }
        for rule in &self.faults {
            device.faults().arm(*rule);
        }
        Ok(device)
    }
}

/// The spec again, in its shortest form.
impl fmt::Display for OriginSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.hdd {
            Some(Drive::Own) => f.write_str("model-hdd:")?,
            Some(Drive::Shared(name)) => write!(f, "model-hdd={name}:")?,
            None => {}
        }
        if self.latency_ns > 0 {
            write!(f, "model-latency={}us:", self.latency_ns as f64 / 1e3)?;
        }
        for rule in &self.faults {
            let kind = match rule.kind {
                FaultKind::Read => "read",
                FaultKind::Write => "write",
                FaultKind::Flush => "flush",
                FaultKind::All => "all",
            };
            write!(f, "fault=eio-{kind}")?;
            if (rule.offset, rule.len) != (0, u64::MAX) {
                write!(f, "@{}+{}", rule.offset, rule.len)?;
            }
            f.write_str(":")?;
        }
        let path = match &self.source {
            Source::File(path) => path.to_string_lossy(),
            Source::Other { scheme, rest } => return write!(f, "{scheme}:{rest}"),
        };
        // A path that looks like a wrapper or scheme needs the prefix to be read back as a path.
        let wrapper = path.starts_with("model-") || path.starts_with("fault=");
        if self.raw_bytes
            || wrapper
            || !matches!(source(&path), Source::File(p) if p.as_os_str() == path.as_ref())
        {
            f.write_str("file:")?;
        }
        f.write_str(&path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_read_and_write() {
        for text in [
            "/a/b",
            "model-hdd:/a",
            "model-hdd=rack_1-b:/a",
            "model-latency=8000us:/a:b",
            "fault=eio-read:x",
            "fault=eio-write@4096+512:x",
            "file:qcow2:x",
            "file:/a/b",
            "model-hdd:file:/a",
            "qcow2:/a/b",
            "model-latency=8000us:nbd+unix:///x?socket=/s",
            "c:x",
        ] {
            let spec: OriginSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
            assert_eq!(spec.to_string().parse::<OriginSpec>().unwrap(), spec);
        }
        let spec: OriginSpec = "model-hdd:model-latency=1.5ms:file:model-x"
            .parse()
            .unwrap();
        assert_eq!(
            (spec.hdd.clone(), spec.latency_ns, spec.path()),
            (Some(Drive::Own), 1_500_000, Some(Path::new("model-x")))
        );
        assert_eq!(spec.to_string().parse::<OriginSpec>().unwrap(), spec);
        let spec: OriginSpec = "fault=eio-all@1M+64K:/x".parse().unwrap();
        assert_eq!(
            spec.faults[0],
            FaultRule {
                kind: FaultKind::All,
                offset: 1 << 20,
                len: 64 << 10,
                errno: libc::EIO
            }
        );
    }

    #[test]
    fn wrong_specs_are_refused() {
        for text in ["", "file:", "model-hdd:", "model-latency=8ms:"] {
            assert!(
                matches!(text.parse::<OriginSpec>(), Err(SpecError::NoPath(_))),
                "{text}"
            );
        }
        assert_eq!(
            "model-hdd:nbd://h".parse::<OriginSpec>(),
            Err(SpecError::NotFile("nbd".into()))
        );
        for text in [
            "model-latency=8:/a",
            "model-latency=99s:/a",
            "model-latency=xms:/a",
            "model-latency=0ms:/a",
        ] {
            assert!(
                matches!(text.parse::<OriginSpec>(), Err(SpecError::Latency(_))),
                "{text}"
            );
        }
        for name in ["", "a b", "a/b", &"x".repeat(33)] {
            let text = format!("model-hdd={name}:/a");
            assert!(
                matches!(text.parse::<OriginSpec>(), Err(SpecError::Drive(_))),
                "{text}"
            );
        }
        for text in [
            "fault=x:/a",
            "fault=eio-read@1:/a",
            "fault=eio-read@a+b:/a",
            "fault=eio-read@99999999999G+1:/a",
        ] {
            assert!(
                matches!(text.parse::<OriginSpec>(), Err(SpecError::Fault(_))),
                "{text}"
            );
        }
    }
}
