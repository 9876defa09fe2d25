//! One disk, one life: what a disk is doing, and what follows when something happens to it.
//!
//! A disk is opened, judged, served, drained, removed, shut out, by threads that do not know of each
//! other and in any order. What it is doing is therefore said in one place: [`Life`] is told of each
//! [`Event`] and answers with what the disk does from now on and with the [`Effect`]s that have to follow,
//! in that order. There is no clock, no lock and no I/O here. Who acts (`daemon/course.rs`) has the disk's
//! turn ([`crate::table`]), so that effects of two events never mix; the simulation beside this file acts
//! as well, and looks for what must never be.
//!
//! What must hold, whatever happens in whatever order:
//! - a disk is offered to clients only while the engine has it, and never twice;
//! - its origin is closed only when the engine has let go of it, and given up (its owner's record
//!   erased) only when it is closed and the registry does not know the disk any more;
//! - a disk is gone only when that is durable.

#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;

use crate::error::Error;

/// Why a disk is not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unserved {
    /// The origin is missing, or does not answer. Tried again.
    Waiting(Error),
    /// The origin does not fit what is on flash. Somebody must decide.
    Refused {
        why: Error,
        /// What is wrong is put right outside (the origin is smaller than the disk, or lies on other
        /// files than it did), so that the disk is tried again.
        watched: bool,
    },
}

impl Unserved {
    /// Why.
    pub(crate) fn why(&self) -> &Error {
        match self {
            Unserved::Waiting(e) | Unserved::Refused { why: e, .. } => e,
        }
    }
}

/// How far a removal is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The disk is served while what is dirty goes to the origin.
    Draining,
    /// Requests are refused; waiting for those in flight.
    Closing,
    /// The engine is letting go of it.
    Detaching,
}

/// What a disk is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// It has a number and a name, and is being made known: added here, or taken over from another
    /// host. Nobody sees it yet.
    Arriving,
    /// Not served.
    Unserved(Unserved),
    /// Its origin is being opened. Until then it was not served for this reason.
    Opening(Unserved),
    /// Its origin is open; whether it is what the cache believes is being said.
    Judging(Unserved),
    /// The engine has it, but clients must wait until what is dirty has won over the origin.
    Reconciling,
    /// The engine has it, and clients may connect.
    Served {
        /// Everything dirty is being written to the origin because somebody asked for that.
        flushing: bool,
    },
    /// It is being removed, and that can still be called off.
    Removing {
        /// Dirty blocks are thrown away.
        discard: bool,
        stage: Stage,
        /// Why it was not served when that began; `None`: it was.
        from: Option<Unserved>,
    },
    /// The engine has let it go, and it is being erased. There is no way back.
    Leaving,
    /// Its origin is another's, for this reason; waiting until nothing of it is in flight.
    Fencing(Error),
    /// The registry does not know it any more. It only keeps its number from being given away.
    Gone,
}

/// What may happen to a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Its origin is about to be opened.
    Open,
    /// The origin was opened and looked at, or could not be.
    Opened,
    /// It was judged, and the engine has it.
    Taken {
        /// What is dirty must be in the origin before anybody reads.
        reconcile: bool,
    },
    /// It is not served, for this reason.
    NotTaken(Unserved),
    /// Who opened, judged or added it has ended without a word, or because the daemon stops.
    Abandoned,
    /// Somebody wants everything dirty in the origin.
    Flush,
    /// Somebody wants it removed.
    Remove { discard: bool },
    /// Somebody does not want that any more.
    Cancel,
    /// What was begun cannot be completed.
    Failed(Error),
    /// Nothing dirty is left (or counts).
    Drained,
    /// What was cached and may be old is gone, and the registry knows it.
    Settled,
    /// Nothing of it is in flight any more.
    AtRest,
    /// The engine has let go of it; `owed`: although something dirty had come at the last moment.
    Detached { owed: bool },
    /// The engine cannot let go of it yet.
    Busy,
    /// The origin is closed, or was left to be closed when it answers.
    Closed,
    /// The registry does not know the disk any more, durably.
    Erased,
    /// The owner's record of its origin is erased, or was left to be when its storage answers.
    GivenUp,
    /// The registry knows it still.
    NotErased(Error),
    /// Its origin is another's.
    Fence(Error),
}

/// What has to follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Let clients find it.
    Offer,
    /// Let them find it no more; those that are connected stay.
    Withdraw,
    /// Refuse requests of clients that are connected, or take them again.
    Shut(bool),
    /// Have the engine write everything dirty to the origin, or no more than usual.
    Drain(bool),
    /// Drop what is cached and may be old, and store that: [`Event::Settled`].
    Settle,
    /// Have the engine let go of it: [`Event::Detached`] or [`Event::Busy`].
    Detach,
    /// Give it to the engine again.
    Reattach,
    /// End the connections that do not end by themselves.
    Disconnect,
    /// It is no more: whoever is still connected goes.
    CutOff,
    /// Close the origin. `wait`: [`Event::Closed`] when that is done, or late.
    Close { wait: bool },
    /// Take it out of the registry: [`Event::Erased`] or [`Event::NotErased`].
    Erase,
    /// Erase the owner's record of the origin: [`Event::GivenUp`].
    GiveUp,
    /// Keep the owner's record no longer; it is another's.
    DropClaim,
    /// Free its name, and its number as soon as the log has nothing of it.
    Retire,
    /// Tell users why something they had begun was not completed.
    Tell(Error),
}

/// Why something cannot happen to a disk now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It is not served, for this reason.
    Unserved(Unserved),
    /// It is served; there is nothing to open.
    Served,
    /// What waited on flash is being written to the origin.
    Reconciling,
    /// It is being removed.
    Removing,
    /// It is being removed, and that cannot be called off any more.
    Leaving,
    /// Its origin is being opened or judged.
    Opening,
    /// Its origin is another's.
    Fenced(Error),
    /// There is no such disk (yet, or any more).
    Unknown,
}

use Effect as Do;

impl Life {
    /// What the disk does after `event`, and what has to follow. An error means that nothing has
    /// changed.
    pub(crate) fn on(&self, event: Event) -> Result<(Life, Vec<Effect>), Refusal> {
        match event {
            Event::Open => match self {
                Life::Unserved(why) => Ok((Life::Opening(why.clone()), Vec::new())),
                _ => Err(self.refusal()),
            },
            Event::Opened => match self {
                Life::Opening(why) => Ok((Life::Judging(why.clone()), Vec::new())),
                _ => Err(self.refusal()),
            },
            Event::Taken { reconcile } => match self {
                Life::Arriving | Life::Judging(_) if reconcile => {
                    Ok((Life::Reconciling, vec![Do::Drain(true)]))
                }
                Life::Arriving | Life::Judging(_) => Ok((SERVED, vec![Do::Offer])),
                _ => Err(self.refusal()),
            },
            Event::NotTaken(why) => match self {
                Life::Arriving | Life::Judging(_) => Ok((Life::Unserved(why), Vec::new())),
                _ => Err(self.refusal()),
            },
            Event::Abandoned => Ok(self.abandoned()),
            Event::Flush => match self {
                Life::Served { .. } => Ok((Life::Served { flushing: true }, vec![Do::Drain(true)])),
                _ => Err(self.refusal()),
            },
            Event::Remove { discard } => self.remove(discard),
            Event::Cancel => self.call_off(Vec::new()),
            Event::Failed(error) => self.call_off(vec![Do::Tell(error)]),
            Event::Drained => Ok(self.drained()),
            Event::Settled => match self {
                Life::Reconciling => Ok((SERVED, vec![Do::Drain(false), Do::Offer])),
                _ => Err(self.refusal()),
            },
            Event::AtRest => Ok(self.at_rest()),
            Event::Detached { owed } => self.detached(owed),
            Event::Busy => Ok((self.busy(), Vec::new())),
            Event::Closed => match self {
                Life::Leaving => Ok((Life::Leaving, vec![Do::Erase])),
                _ => Ok(self.same()),
            },
            Event::Erased => match self {
                // It is not gone yet: who is told that it is may add its origin elsewhere.
                Life::Leaving => Ok((Life::Leaving, vec![Do::GiveUp])),
                _ => Err(self.refusal()),
            },
            Event::GivenUp => match self {
                Life::Leaving => Ok((Life::Gone, vec![Do::Retire])),
                _ => Err(self.refusal()),
            },
            // Its origin is opened again by those who look for missing ones: that may take as long as
            // the origin likes.
            Event::NotErased(error) => match self {
                Life::Leaving => Ok((
                    Life::Unserved(Unserved::Waiting(error.clone())),
                    vec![Do::Tell(error)],
                )),
                _ => Err(self.refusal()),
            },
            Event::Fence(why) => self.fence(why),
        }
    }

    fn same(&self) -> (Life, Vec<Effect>) {
        (self.clone(), Vec::new())
    }

    fn abandoned(&self) -> (Life, Vec<Effect>) {
        match self {
            Life::Arriving => (Life::Gone, vec![Do::Retire]),
            Life::Opening(why) | Life::Judging(why) => {
                (Life::Unserved(why.clone()), vec![Do::Close { wait: false }])
            }
            // The next look tries again.
            Life::Removing { .. } => (self.busy(), Vec::new()),
            _ => self.same(),
        }
    }

    fn remove(&self, discard: bool) -> Result<(Life, Vec<Effect>), Refusal> {
        let (from, effects) = match self {
            Life::Served { .. } => (None, vec![Do::Drain(!discard), Do::Withdraw]),
            // Perhaps with another answer to what becomes of dirty blocks.
            Life::Removing { from, .. } => match from {
                None => (None, vec![Do::Drain(!discard), Do::Withdraw]),
                Some(why) => (Some(why.clone()), Vec::new()),
            },
            Life::Unserved(why) => (Some(why.clone()), Vec::new()),
            _ => return Err(self.refusal()),
        };
        let next = Life::Removing {
            discard,
            stage: Stage::Draining,
            from,
        };
        Ok((next, effects))
    }

    /// Ends what was begun without completing it. What was written stays written.
    fn call_off(&self, then: Vec<Effect>) -> Result<(Life, Vec<Effect>), Refusal> {
        let (next, mut effects) = match self {
            Life::Served { flushing: true } => (SERVED, vec![Do::Drain(false)]),
            Life::Removing {
                from: Some(why), ..
            } => (Life::Unserved(why.clone()), Vec::new()),
            Life::Removing { from: None, .. } => {
                (SERVED, vec![Do::Drain(false), Do::Shut(false), Do::Offer])
            }
            Life::Leaving => return Err(self.refusal()),
            _ => self.same(),
        };
        effects.extend(then);
        Ok((next, effects))
    }

    fn drained(&self) -> (Life, Vec<Effect>) {
        match self {
            Life::Reconciling => (Life::Reconciling, vec![Do::Settle]),
            Life::Served { flushing: true } => (SERVED, vec![Do::Drain(false)]),
            Life::Removing {
                discard,
                stage: Stage::Draining,
                from,
            } => (
                Life::Removing {
                    discard: *discard,
                    stage: Stage::Closing,
                    from: from.clone(),
                },
                // From here on the guest's requests are refused, so that the end comes.
                if from.is_none() {
                    vec![Do::Shut(true)]
                } else {
                    Vec::new()
                },
            ),
            _ => self.same(),
        }
    }

    fn at_rest(&self) -> (Life, Vec<Effect>) {
        match self {
            // The second of these, and the one below, if who was at it has ended without a word.
            Life::Removing {
                discard,
                stage: Stage::Closing | Stage::Detaching,
                from,
            } => (
                Life::Removing {
                    discard: *discard,
                    stage: Stage::Detaching,
                    from: from.clone(),
                },
                vec![Do::Detach],
            ),
            Life::Leaving => (Life::Leaving, vec![Do::Close { wait: true }]),
            _ => self.same(),
        }
    }

    fn busy(&self) -> Life {
        match self {
            Life::Removing {
                discard,
                stage: Stage::Detaching,
                from,
            } => Life::Removing {
                discard: *discard,
                stage: Stage::Closing,
                from: from.clone(),
            },
            _ => self.clone(),
        }
    }

    fn detached(&self, owed: bool) -> Result<(Life, Vec<Effect>), Refusal> {
        match self {
            // A guest's last write may have come between the last look and the detaching.
            Life::Removing {
                discard: false,
                stage: Stage::Detaching,
                from,
            } if owed => {
                let again = Error::conflict(
                    "new writes to the disk arrived at the last moment",
                    "remove it again",
                );
                Ok(match from {
                    Some(why) => (Life::Unserved(why.clone()), vec![Do::Tell(again)]),
                    None => (
                        SERVED,
                        vec![
                            Do::Reattach,
                            Do::Drain(false),
                            Do::Shut(false),
                            Do::Offer,
                            Do::Tell(again),
                        ],
                    ),
                })
            }
            Life::Removing {
                stage: Stage::Detaching,
                ..
            } => Ok((
                Life::Leaving,
                vec![
                    Do::Withdraw,
                    Do::Disconnect,
                    Do::CutOff,
                    Do::Close { wait: true },
                ],
            )),
            Life::Fencing(why) => Ok((
                Life::Unserved(Unserved::Refused {
                    why: why.clone(),
                    watched: false,
                }),
                // Nobody waits for what may hang.
                vec![Do::CutOff, Do::DropClaim, Do::Close { wait: false }],
            )),
            _ => Err(self.refusal()),
        }
    }

    fn fence(&self, why: Error) -> Result<(Life, Vec<Effect>), Refusal> {
        match self {
            Life::Served { .. }
            | Life::Reconciling
            | Life::Removing { from: None, .. }
            | Life::Fencing(_) => Ok((
                Life::Fencing(why),
                vec![Do::Withdraw, Do::Disconnect, Do::Shut(true), Do::Detach],
            )),
            _ => Err(self.refusal()),
        }
    }

    /// Why something else cannot happen now.
    pub(crate) fn refusal(&self) -> Refusal {
        match self {
            Life::Arriving | Life::Gone => Refusal::Unknown,
            Life::Unserved(why) => Refusal::Unserved(why.clone()),
            Life::Opening(_) | Life::Judging(_) => Refusal::Opening,
            Life::Reconciling => Refusal::Reconciling,
            Life::Served { .. } => Refusal::Served,
            Life::Removing { .. } => Refusal::Removing,
            Life::Leaving => Refusal::Leaving,
            Life::Fencing(why) => Refusal::Fenced(why.clone()),
        }
    }

    /// Has users, who may ask for it by name.
    pub(crate) fn is_known(&self) -> bool {
        !matches!(self, Life::Arriving | Life::Gone)
    }

    /// Clients may use it.
    pub(crate) fn is_served(&self) -> bool {
        matches!(
            self,
            Life::Served { .. } | Life::Removing { from: None, .. } | Life::Fencing(_)
        )
    }

    /// Why it is not served, if there is a reason to tell.
    pub(crate) fn unserved(&self) -> Option<&Unserved> {
        match self {
            Life::Unserved(why)
            | Life::Opening(why)
            | Life::Judging(why)
            | Life::Removing {
                from: Some(why), ..
            } => Some(why),
            _ => None,
        }
    }

    /// Attaching it is worth another try.
    pub(crate) fn is_awaited(&self) -> bool {
        match self {
            Life::Unserved(Unserved::Waiting(_)) => true,
            Life::Unserved(Unserved::Refused { watched, .. }) => *watched,
            _ => false,
        }
    }

    /// Is being removed.
    pub(crate) fn is_removed(&self) -> bool {
        matches!(self, Life::Removing { .. } | Life::Leaving)
    }

    /// Something was begun that ends by itself, so that somebody has to look how far it is.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(
            self,
            Life::Reconciling
                | Life::Served { flushing: true }
                | Life::Removing { .. }
                | Life::Leaving
        )
    }
}

const SERVED: Life = Life::Served { flushing: false };
