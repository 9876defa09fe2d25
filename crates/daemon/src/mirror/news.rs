//! What happens to a mirror's legs, as events of its disk.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use hearth_events::{Event, Events};
use hearth_mirror::{News, Witness};

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
        };
        self.events.tell(event);
    }
}
