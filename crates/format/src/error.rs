//! Why bytes on flash were refused.
//!
//! The sentences reach the user unchanged, so each says what, why and what to do. The
//! variants hit while walking the log carry no allocation: the end of every log is an error.

/// A small size for people.
fn mib(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{bytes} bytes"),
        _ => format!("{} MiB", bytes >> 20),
    }
}

/// Why a structure could not be read from, or put on, flash.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The magic number is missing: whatever is there, it is not this structure.
    #[error("no {what} here")]
    NotFound {
        /// The structure looked for.
        what: &'static str,
    },
    /// No superblock copy on the device.
    #[error(
        "this device holds no Hearth pool; give another path, or format it with `hearth pool create`"
    )]
    NotAPool,
    /// Written by a newer Hearth in a way this one must not touch.
    #[error(
        "the {what} needs {feature}, which this version of Hearth does not know; open it with a newer Hearth"
    )]
    Newer {
        /// The structure.
        what: &'static str,
        /// The version or feature bits, in words.
        feature: String,
    },
    /// The structure is there but its bytes are wrong.
    #[error("the {what} is damaged: {why}")]
    Damaged {
        /// The structure.
        what: &'static str,
        /// The check that failed.
        why: &'static str,
    },
    /// A part of a structure with a name or number is wrong.
    #[error("the {what} is damaged: {why}")]
    Wrong {
        /// The structure.
        what: &'static str,
        /// The check that failed, with the offending value.
        why: String,
    },
    /// The device is smaller than when it was formatted.
    #[error(
        "the device is truncated: the pool was made on {recorded} bytes but only {actual} are there; \
         restore the missing part before opening it"
    )]
    TruncatedDevice {
        /// Bytes when formatted.
        recorded: u64,
        /// Bytes now.
        actual: u64,
    },
    /// Too small to be formatted.
    #[error(
        "it has {} but a pool needs at least {}; use a larger device, or make a larger file with --size",
        mib(*actual),
        mib(needed.next_multiple_of(1 << 20))
    )]
    TooSmall {
        /// Bytes needed.
        needed: u64,
        /// Bytes there.
        actual: u64,
    },
    /// A value given to an encoder does not fit the format: the caller's fault.
    #[error("the {what} cannot be written: {why}")]
    Unfit {
        /// The structure.
        what: &'static str,
        /// What does not fit.
        why: String,
    },
    /// The device failed.
    #[error("{doing} failed: {source}; check the device's health")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The device's answer.
        source: std::io::Error,
    },
}

impl FormatError {
    pub(crate) fn damaged(what: &'static str, why: &'static str) -> FormatError {
        FormatError::Damaged { what, why }
    }

    pub(crate) fn unfit(what: &'static str, why: impl Into<String>) -> FormatError {
        FormatError::Unfit {
            what,
            why: why.into(),
        }
    }

    pub(crate) fn wrong(what: &'static str, why: impl Into<String>) -> FormatError {
        FormatError::Wrong {
            what,
            why: why.into(),
        }
    }

    /// True if the structure is simply not there, as opposed to there and broken.
    pub fn is_absent(&self) -> bool {
        matches!(self, FormatError::NotFound { .. } | FormatError::NotAPool)
    }
}
