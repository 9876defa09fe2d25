//! Errors of the control plane: one sentence that says what and where, and what to do about it.

use std::fmt;

use hearth_fault::{Fault, sentence};

/// What sort of failure it is; decides the HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request makes no sense (400).
    Invalid,
    /// No such disk or pool (404).
    NotFound,
    /// It would clash with something that exists or is going on (409).
    Conflict,
    /// Hearth could, but will not without being told which risk to take (412).
    Refused,
    /// A device, file or socket failed us (503).
    Unavailable,
    /// Our own fault (500).
    Internal,
}

/// A failure with its remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Sort of failure.
    pub kind: Kind,
    /// What is wrong, and where. No full stop at the end.
    pub what: String,
    /// What to do about it; may be empty when there is nothing the user can do.
    pub remedy: String,
}

impl Error {
    /// An error of `kind`.
    ///
    /// Other crates' errors are whole sentences, "what; remedy". Without a remedy of its own,
    /// such a sentence is taken apart: programs read the two from different fields.
    pub fn new(kind: Kind, what: impl Into<String>, remedy: impl Into<String>) -> Error {
        let (mut what, mut remedy) = (what.into(), remedy.into());
        if remedy.is_empty()
            && let Some((before, after)) = what.rsplit_once("; ")
        {
            remedy = after.to_owned();
            what.truncate(before.len());
        }
        Error { kind, what, remedy }
    }

    /// The request makes no sense.
    pub fn invalid(what: impl Into<String>, remedy: impl Into<String>) -> Error {
        Error::new(Kind::Invalid, what, remedy)
    }

    /// A clash with the state of things.
    pub fn conflict(what: impl Into<String>, remedy: impl Into<String>) -> Error {
        Error::new(Kind::Conflict, what, remedy)
    }

    /// A risk nobody has accepted yet.
    pub fn refused(what: impl Into<String>, remedy: impl Into<String>) -> Error {
        Error::new(Kind::Refused, what, remedy)
    }

    /// Something outside failed.
    pub fn unavailable(what: impl Into<String>, remedy: impl Into<String>) -> Error {
        Error::new(Kind::Unavailable, what, remedy)
    }

    /// Our own fault.
    pub fn internal(what: impl Into<String>) -> Error {
        Error::new(
            Kind::Internal,
            what,
            "please report this with the daemon's log",
        )
    }

    /// No disk of that name.
    pub fn no_disk(name: &str) -> Error {
        Error::new(
            Kind::NotFound,
            format!("there is no disk named {name}"),
            "list the disks with `hearth disk list`",
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        sentence(f, &self.what, &self.remedy)
    }
}

impl std::error::Error for Error {}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::new(error.what, error.remedy)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Error {
        Error::unavailable(fault.what, fault.remedy)
    }
}

/// Result of a control operation.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_is_taken_apart_and_reads_the_same() {
        let sentence = "/a;b is no trace; or is it; name its form with --format";
        let error = Error::invalid(sentence, "");
        assert_eq!(error.what, "/a;b is no trace; or is it");
        assert_eq!(error.remedy, "name its form with --format");
        assert_eq!(error.to_string(), sentence);
        let whole = Error::invalid("one; two", "three");
        assert_eq!((&*whole.what, &*whole.remedy), ("one; two", "three"));
        assert_eq!(Error::invalid("only this", "").remedy, "");
    }
}
