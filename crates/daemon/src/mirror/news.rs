//! What happens to a mirror's legs, as events of its disk.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use hearth_events::{Event, Events};
use hearth_mirror::{News, ScrubState, Witness};

/// Legs that were told to be stale: a disk that waits for another one is tried again and again.
pub(crate) type Stale = Mutex<BTreeSet<(String, String)>>;

/// Tells the events of one disk.
pub(crate) struct Herald {
    disk: String,
    events: Arc<Events>,
    stale: Arc<Stale>,
}

impl Herald {
    pub(crate) fn new(disk: &str, events: &Arc<Events>, stale: &Arc<Stale>) -> Herald {
        Herald {
            disk: disk.to_owned(),
            events: events.clone(),
            stale: stale.clone(),
        }
    }

    /// The mirror is open: from now on a leg that is stale is news again.
    pub(crate) fn opened(&self) {
        let mut stale = crate::daemon::lock(&self.stale);
        stale.retain(|(disk, _)| *disk != self.disk);
    }
}

impl Witness for Herald {
    fn tell(&self, news: News) {
        let disk = self.disk.clone();
        let event = match news {
            News::Lost { leg, why } => Event::LegLost { disk, leg, why },
            News::Resyncing { leg, bytes } => Event::LegResyncing { disk, leg, bytes },
            News::Current { leg } => Event::LegCurrent { disk, leg },
            News::Repaired {
                leg,
                ranges,
                bytes,
                offset,
            } => Event::LegRepaired {
                disk,
                leg,
                ranges,
                bytes,
                offset,
            },
            News::Changed { leg, why } => Event::LegChanged { disk, leg, why },
            News::Stale { leg } => {
                let known = (disk.clone(), leg.clone());
                if !crate::daemon::lock(&self.stale).insert(known) {
                    return;
                }
                Event::LegStale { disk, leg }
            }
            News::ScrubStarted { at } => Event::ScrubStarted { disk, at },
            News::Scrubbed {
                whole,
                deciding,
                state,
            } => scrubbed(disk, whole, deciding, &state),
        };
        self.events.tell(event);
    }
}

/// What came of a scrub.
fn scrubbed(disk: String, whole: bool, deciding: bool, state: &ScrubState) -> Event {
    let (bytes, partial) = (state.checked, state.partial);
    let seconds = state.ended_ms.saturating_sub(state.began_ms) / 1000;
    let (repairs, repaired) = (state.repairs, state.repaired);
    if !whole && !deciding {
        return Event::ScrubCalledOff { disk, at: state.at };
    }
    if state.undecided_all > 0 || state.unread > 0 {
        let first = state.undecided.first();
        return Event::ScrubUndecided {
            disk,
            bytes,
            partial,
            seconds,
            repairs,
            repaired,
            undecided: state.undecided_all,
            offset: first.map_or(0, |u| u.offset),
            length: first.map_or(0, |u| u.len),
            unread: state.unread,
        };
    }
    if repairs > 0 {
        return Event::ScrubRepaired {
            disk,
            bytes,
            partial,
            seconds,
            repairs,
            repaired,
        };
    }
    Event::ScrubDone {
        disk,
        bytes,
        partial,
        seconds,
    }
}
