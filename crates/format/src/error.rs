//! Why bytes on flash were refused.
//!
//! The sentences reach the user unchanged, so each says what, why and what to do. The
//! variants hit while walking the log carry no allocation: the end of every log is an error.

use hearth_fault::Fault;

/// A small size for people.
fn mib(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{bytes} bytes"),
        _ => format!("{} MiB", bytes >> 20),
    }
}

/// Why a structure could not be read from, or put on, flash.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.fault())]
pub enum FormatError {
    /// The magic number is missing: whatever is there, it is not this structure.
    NotFound {
        /// The structure looked for.
        what: &'static str,
    },
    /// No superblock copy on the device.
    NotAPool,
    /// Written by a newer Hearth in a way this one must not touch.
    Newer {
        /// The structure.
        what: &'static str,
        /// The version or feature bits, in words.
        feature: String,
    },
    /// The structure is there but its bytes are wrong.
    Damaged {
        /// The structure.
        what: &'static str,
        /// The check that failed.
        why: &'static str,
    },
    /// A part of a structure with a name or number is wrong.
    Wrong {
        /// The structure.
        what: &'static str,
        /// The check that failed, with the offending value.
        why: String,
    },
    /// The device is smaller than when it was formatted.
    TruncatedDevice {
        /// Bytes when formatted.
        recorded: u64,
        /// Bytes now.
        actual: u64,
    },
    /// Too small to be formatted.
    TooSmall {
        /// Bytes needed.
        needed: u64,
        /// Bytes there.
        actual: u64,
    },
    /// A value given to an encoder does not fit the format: the caller's fault.
    Unfit {
        /// The structure.
        what: &'static str,
        /// What does not fit.
        why: Fault,
    },
    /// The device was to take the place of another one of its pool, and that was cut off.
    Coming {
        /// That one.
        of: uuid::Uuid,
    },
    /// Another device has taken its place in its pool.
    Gone {
        /// That one.
        by: uuid::Uuid,
    },
    /// The device failed.
    Io {
        /// What was being done.
        doing: &'static str,
        /// The device's answer.
        source: std::io::Error,
    },
}

/// Damage has one remedy, whatever is damaged.
fn damaged(what: &str, why: &str) -> Fault {
    Fault::new(
        format!("the {what} is damaged: {why}"),
        "check the device's health, and whether something else wrote there",
    )
}

impl FormatError {
    /// What is wrong, and what to do about it.
    pub fn fault(&self) -> Fault {
        match self {
            FormatError::NotFound { what } => Fault::bare(format!("no {what} here")),
            FormatError::NotAPool => Fault::new(
                "this device holds no Hearth pool",
                "give another path, or format it with `hearth pool create`",
            ),
            FormatError::Newer { what, feature } => Fault::new(
                format!("the {what} needs {feature}, which this version of Hearth does not know"),
                "open it with a newer Hearth",
            ),
            FormatError::Damaged { what, why } => damaged(what, why),
            FormatError::Wrong { what, why } => damaged(what, why),
            FormatError::TruncatedDevice { recorded, actual } => Fault::new(
                format!(
                    "the device is truncated: the pool was made on {recorded} bytes but only {actual} are there"
                ),
                "restore the missing part before opening it",
            ),
            FormatError::TooSmall { needed, actual } => Fault::new(
                format!(
                    "it has {} but a pool needs at least {}",
                    mib(*actual),
                    mib(needed.next_multiple_of(1 << 20))
                ),
                "use a larger device, or make a larger file with --size",
            ),
            FormatError::Unfit { what, why } => {
                why.clone().within(format!("the {what} cannot be written"))
            }
            FormatError::Coming { of } => Fault::new(
                format!(
                    "it was to take the place of device {of} of its pool, and that was cut off"
                ),
                "run `hearth pool replace-flash` again with both devices",
            ),
            FormatError::Gone { by } if by.is_nil() => Fault::new(
                "it was taken out of its pool",
                "leave it out; or make it a part of a pool again with `hearth pool add-flash`, or with `hearth pool create --force`",
            ),
            FormatError::Gone { by } => Fault::new(
                format!("device {by} has taken its place in the pool"),
                "give that one; if it does not have it yet because the replacement was cut off, run `hearth pool replace-flash` again with both devices",
            ),
            FormatError::Io { doing, source } => Fault::new(
                format!("{doing} failed: {source}"),
                "check the device's health",
            ),
        }
    }
}

impl FormatError {
    pub(crate) fn damaged(what: &'static str, why: &'static str) -> FormatError {
        FormatError::Damaged { what, why }
    }

    pub(crate) fn unfit(what: &'static str, why: impl Into<String>) -> FormatError {
        FormatError::Unfit {
            what,
            why: Fault::bare(why),
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
