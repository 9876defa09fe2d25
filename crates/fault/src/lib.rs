//! What is wrong, and what to do about it: two fields, in every layer.
//!
//! Programs read the two from different fields of an answer, people read them as one sentence. Whoever
//! has only the sentence must cut it apart again, and cuts wrongly as soon as a file's name holds the
//! mark he looks for. So they stay apart from where the failure is found to where it is shown.

use std::fmt;

/// A failure with its remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What is wrong, and where. No full stop at the end.
    pub what: String,
    /// What to do about it; empty when there is nothing the user can do.
    pub remedy: String,
}

impl Fault {
    /// A failure and its remedy.
    pub fn new(what: impl Into<String>, remedy: impl Into<String>) -> Fault {
        Fault {
            what: what.into(),
            remedy: remedy.into(),
        }
    }

    /// A failure about which the user can do nothing.
    pub fn bare(what: impl Into<String>) -> Fault {
        Fault::new(what, "")
    }

    /// The same, told by somebody who knows where it happened or what it kept from happening.
    pub fn within(self, whole: impl fmt::Display) -> Fault {
        Fault {
            what: format!("{whole}: {}", self.what),
            remedy: self.remedy,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        sentence(f, &self.what, &self.remedy)
    }
}

impl std::error::Error for Fault {}

/// Writes both as one sentence.
pub fn sentence(f: &mut fmt::Formatter<'_>, what: &str, remedy: &str) -> fmt::Result {
    f.write_str(what.trim_end_matches('.'))?;
    if !remedy.is_empty() {
        write!(f, "; {}", remedy.trim_end_matches('.'))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_read_as_one_sentence() {
        let fault = Fault::new("the disk is gone.", "bring it back.");
        assert_eq!(fault.to_string(), "the disk is gone; bring it back");
        assert_eq!(Fault::new("only this", "").to_string(), "only this");
    }
}
