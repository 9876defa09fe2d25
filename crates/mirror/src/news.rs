//! What somebody has to hear of a mirror's legs: it is told as it happens, once.

use crate::habits::ScrubState;

/// Something that happened. Legs are named as they were given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// It takes no part any more.
    Lost {
        /// The leg.
        leg: String,
        /// Why.
        why: String,
    },
    /// It is being copied to.
    Resyncing {
        /// The leg.
        leg: String,
        /// What it lacks, at most.
        bytes: u64,
    },
    /// It holds the disk, after it did not.
    Current {
        /// The leg.
        leg: String,
    },
    /// What it could not read was written to it again.
    Repaired {
        /// The leg.
        leg: String,
        /// So many ranges since this was told last.
        ranges: u64,
        /// So long in all.
        bytes: u64,
        /// Where the first one is.
        offset: u64,
    },
    /// It is not as it was left; all of it is copied to.
    Changed {
        /// The leg.
        leg: String,
        /// What shows it.
        why: String,
    },
    /// It is there and has missed writes, and none is there that has them.
    Stale {
        /// The leg.
        leg: String,
    },
    /// A scrub begins, or goes on.
    ScrubStarted {
        /// Where.
        at: u64,
    },
    /// A scrub has ended.
    Scrubbed {
        /// It is through; else somebody called it off.
        whole: bool,
        /// It was only about what one before had not decided.
        deciding: bool,
        /// What is known now.
        state: Box<ScrubState>,
    },
}

/// Who is told. Must not block: the mirror's thread tells.
pub trait Witness: Send + Sync {
    /// Something happened.
    fn tell(&self, news: News);
}
