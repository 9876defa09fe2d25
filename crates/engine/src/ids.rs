//! Names by which the parts of the engine speak of what they do not know.
//!
//! The log, a disk's ranges and an origin's flushes keep requests waiting. They keep their names and
//! give them back; what a request is they never see.

/// A request the engine has taken.
///
/// Its place is given to another once it was answered; its life is not. So a name that outlives its
/// request is noticed where it is used, and never reaches the next one at the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ReqId {
    place: u32,
    life: u32,
}

impl ReqId {
    pub fn new(place: usize, life: u32) -> ReqId {
        let place = u32::try_from(place).expect("requests in flight are bounded far below 2^32");
        ReqId { place, life }
    }

    pub fn place(self) -> usize {
        self.place as usize
    }
}
