//! Errors of the control plane: what is wrong and where, and what to do about it.

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
    /// An error of `kind`, in our own words.
    pub fn new(kind: Kind, what: impl Into<String>, remedy: impl Into<String>) -> Error {
        Error::of(kind, Fault::new(what, remedy))
    }

    /// What another crate found wrong.
    pub fn of(kind: Kind, fault: Fault) -> Error {
        let Fault { what, remedy } = fault;
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

    /// There is no such datastore.
    pub fn no_datastore(name: &str) -> Error {
        Error::new(
            Kind::NotFound,
            format!("there is no datastore named {name}"),
            "list the datastores with `hearth datastore list`",
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
        Error::of(Kind::Unavailable, fault)
    }
}

/// Result of a control operation.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_fields_stay_as_they_were_given() {
        let fault = Fault::new("/a; b is no trace; or is it", "name its form");
        let error = Error::of(Kind::Invalid, fault.clone());
        assert_eq!(error.to_string(), fault.to_string());
        assert_eq!(Fault::from(error), fault);
        assert_eq!(Error::of(Kind::Invalid, Fault::bare("a; b")).remedy, "");
    }
}
