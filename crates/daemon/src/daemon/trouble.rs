//! Disks whose dirty blocks do not reach their origin, and telling so.
//!
//! Write-back hides a dead origin: guests go on until flash is full of what only flash has, and
//! then stall without a word. So it is said wherever somebody may look: in the log at once and
//! then at growing intervals, and for as long as it lasts in the disk's state and statistics.

use std::sync::Arc;
use std::time::Duration;

use hearth_engine::DiskStatus;
use hearth_events::Event;
use hearth_fault::Fault;
use hearth_io::IoError;

use super::{Daemon, Slot, lock};
use crate::api::types::{ByteRange, WriteBackTrouble};
use crate::error::Error;
use crate::progress::human_seconds;
use crate::size::human;

/// An origin that owes the destager an answer for longer than this is said to hang. A disk that is
/// merely slow answers a write of 1 MiB, or the flush of a full write cache, well within it.
const HANGS: Duration = Duration::from_secs(30);
/// Wait before what was said is said again; doubles each time.
const SAY_AGAIN: Duration = Duration::from_secs(10);
/// Longest such wait.
const SAY_AGAIN_MAX: Duration = Duration::from_secs(3600);

/// What is to be said now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Say {
    /// It is (still) so.
    Trouble,
    /// It is over.
    Over,
}

/// Decides when something that goes wrong is said (again). Without I/O; times are seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Alarm {
    /// Somebody was told, and not yet that it is over.
    told: bool,
    /// Not to be said again before this time, even if it was over in between: an origin that
    /// comes and goes must not fill the log.
    quiet_until: u64,
    /// The wait after that.
    wait: u64,
}

impl Alarm {
    fn look(&mut self, wrong: bool, now: u64) -> Option<Say> {
        if !wrong {
            if now >= self.quiet_until.saturating_add(self.wait) {
                self.wait = 0;
            }
            return std::mem::take(&mut self.told).then_some(Say::Over);
        }
        if now < self.quiet_until {
            return None;
        }
        self.wait = (self.wait * 2).clamp(SAY_AGAIN.as_secs(), SAY_AGAIN_MAX.as_secs());
        self.quiet_until = now + self.wait;
        self.told = true;
        Some(Say::Trouble)
    }
}

/// How long no write must have waited before an origin that was too far behind is said to be in time.
const IN_TIME_AFTER: Duration = Duration::from_secs(10);

/// Decides when it is said that writes of an ordered disk wait because its origin is too far behind, and that they do no more.
///
/// Under a load that is faster than the origin writes wait, and go on, many times a second. Each of that is too short to be
/// seen by who looks now and then, so waits are counted; and told one by one they would fill the log, so it is over only
/// when there was none for some time. Without I/O; times are seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lateness {
    told: bool,
    /// As many waits were counted when it was looked last.
    waits: u64,
    /// When it was so last.
    last: u64,
}

impl Lateness {
    fn look(&mut self, late: bool, waits: u64, now: u64) -> Option<Say> {
        // Fewer are those of another order: the disk was not an ordered one meanwhile.
        let wrong = late || waits > self.waits;
        self.waits = waits;
        if wrong {
            self.last = now;
            return (!std::mem::replace(&mut self.told, true)).then_some(Say::Trouble);
        }
        let over = self.told && now >= self.last.saturating_add(IN_TIME_AFTER.as_secs());
        self.told &= !over;
        over.then_some(Say::Over)
    }
}

/// What keeps a disk's dirty blocks from its origin, if anything does.
pub(super) fn write_back_trouble(status: &DiskStatus, now_ns: u64) -> Option<WriteBackTrouble> {
    let seconds = |since: u64| now_ns.saturating_sub(since) as f64 / 1e9;
    let hangs = status
        .unanswered_ns
        .map(seconds)
        .filter(|s| *s > HANGS.as_secs_f64());
    let refused = status.trouble.as_ref();
    // One that is shut out says so in its own words.
    if status.fenced || refused.is_none() && hangs.is_none() {
        return None;
    }
    let error = refused.and_then(|t| t.error);
    Some(WriteBackTrouble {
        error: match (hangs, error) {
            (Some(_), _) => "the origin does not answer".to_owned(),
            (None, Some(IoError::Os(errno))) => plain_errno(errno),
            (None, Some(other)) => other.to_string(),
            (None, None) => "what is dirty could not be read from the flash".to_owned(),
        },
        errno: match error {
            Some(IoError::Os(errno)) if hangs.is_none() => Some(errno),
            _ => None,
        },
        seconds: refused
            .map_or(0.0, |t| seconds(t.since_ns))
            .max(hangs.unwrap_or(0.0)),
        failures: refused.map_or(0, |t| t.failures),
        dirty: status.owed_bytes(),
    })
}

/// The system's words for an error, with its number.
fn plain_errno(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    text.replace("(os error ", "(errno ")
}

/// The same for people, and what to do.
pub(super) fn fault(trouble: &WriteBackTrouble, origin: &str) -> Fault {
    Fault::new(
        format!(
            "cannot write back to {origin} for {}: {}; {} are only on flash and are kept there",
            human_seconds(trouble.seconds),
            trouble.error,
            human(trouble.dirty),
        ),
        "see that the origin takes writes again, Hearth goes on trying",
    )
}

/// Why a flush or a removal cannot end, if all that is left of it is lost.
pub(super) fn only_lost_left(name: &str, status: &DiskStatus) -> Option<Error> {
    if !status.only_lost_left {
        return None;
    }
    let ranges: Vec<ByteRange> = (status.lost_ranges.iter())
        .map(|&(offset, length)| ByteRange { offset, length })
        .collect();
    Some(Error::conflict(
        format!(
            "{}; all the rest of {name} is in the origin",
            crate::api::types::lost_sentence(&ranges)
        ),
        format!(
            "restore them from a backup by writing them anew, or give them up with `hearth disk \
             accept-loss {name}` (they then read as the origin has them), and try again"
        ),
    ))
}

impl Daemon {
    /// Says which disks cannot be written back, and which can again.
    pub(super) fn trouble_round(self: &Arc<Daemon>) {
        let (now, now_ns) = (self.now_s(), hearth_io::now_ns());
        let mut disks = self.disks.lock();
        for (_, slot) in disks.all_mut() {
            let status = self.engine.status(slot.id).unwrap_or_default();
            let trouble = write_back_trouble(&status, now_ns);
            self.watch_link(slot);
            self.watch_order(slot, now, now_ns);
            match (slot.session.alarm.look(trouble.is_some(), now), trouble) {
                (Some(Say::Trouble), Some(t)) => {
                    let origin = self.origin_of(slot);
                    self.events.tell(Event::WriteBackFailing {
                        disk: slot.name.clone(),
                        dirty_bytes: t.dirty,
                        seconds: t.seconds as u64,
                        what: fault(&t, &origin).to_string(),
                        origin,
                    });
                }
                (Some(Say::Over), _) => self.events.tell(Event::WriteBackWorks {
                    disk: slot.name.clone(),
                    origin: self.origin_of(slot),
                    dirty_bytes: status.owed_bytes(),
                }),
                _ => {}
            }
        }
    }

    /// Says when writes of an ordered disk begin to wait because its origin is too far behind, and when they do no
    /// more.
    fn watch_order(&self, slot: &mut Slot, now: u64, now_ns: u64) {
        let order = self.engine.order(slot.id, now_ns);
        let (late, waits) = order.map_or((false, 0), |o| (o.late, o.waits));
        let Some(say) = slot.session.lateness.look(late, waits, now) else {
            return;
        };
        let seconds = order.map_or(0, |o| o.age_ns / 1_000_000_000);
        let disk = slot.name.clone();
        self.events.tell(match say {
            Say::Trouble => Event::OriginTooFarBehind { disk, seconds },
            Say::Over => Event::OriginInTime { disk, seconds },
        });
    }

    fn origin_of(&self, slot: &Slot) -> String {
        let pool = lock(&self.pool);
        pool.record(slot.id)
            .map_or_else(String::new, |r| r.origin.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_engine::Trouble;

    #[test]
    fn said_at_once_and_then_at_growing_intervals() {
        let mut alarm = Alarm::default();
        let said: Vec<u64> = (100..20_000)
            .filter(|now| alarm.look(true, *now) == Some(Say::Trouble))
            .collect();
        assert_eq!(said[..5], [100, 110, 130, 170, 250]);
        let longest = said.windows(2).map(|w| w[1] - w[0]).max();
        assert_eq!(longest, Some(SAY_AGAIN_MAX.as_secs()));
        assert_eq!(alarm.look(false, 20_000), Some(Say::Over));
        assert_eq!(alarm.look(false, 20_001), None);
    }

    #[test]
    fn an_origin_that_comes_and_goes_does_not_fill_the_log() {
        let mut alarm = Alarm::default();
        let said = (0..10_000).filter(|now| alarm.look(now % 4 < 2, *now).is_some());
        assert!(said.count() < 40);
        // After a long peace it is news again.
        assert_eq!(alarm.look(false, 50_000), None);
        assert_eq!(alarm.look(true, 50_001), Some(Say::Trouble));
    }

    #[test]
    fn waits_between_two_looks_are_told_and_not_each_of_them() {
        let mut lateness = Lateness::default();
        assert_eq!(lateness.look(false, 0, 100), None);
        // It is over again when somebody looks, and goes on like that.
        assert_eq!(lateness.look(false, 3, 101), Some(Say::Trouble));
        let told = (102..200).filter(|now| lateness.look(now % 3 == 0, *now, *now).is_some());
        assert_eq!(told.count(), 0);
        let told = (200..260).find(|now| lateness.look(false, 199, *now) == Some(Say::Over));
        assert_eq!(told, Some(209));
        assert_eq!(lateness.look(false, 199, 300), None);
        // Not an ordered disk meanwhile: counted from the beginning.
        assert_eq!(lateness.look(false, 0, 301), None);
        assert_eq!(lateness.look(false, 1, 302), Some(Say::Trouble));
    }

    #[test]
    fn an_origin_that_does_not_answer_is_trouble() {
        let second = 1_000_000_000;
        let mut status = DiskStatus {
            unanswered_ns: Some(second),
            ..DiskStatus::default()
        };
        assert_eq!(write_back_trouble(&status, 20 * second), None);
        let trouble = write_back_trouble(&status, 61 * second).unwrap();
        assert!(trouble.error.contains("does not answer"), "{trouble:?}");
        status.unanswered_ns = None;
        status.trouble = Some(Trouble {
            since_ns: second,
            failures: 3,
            error: Some(IoError::Os(libc::ENOSPC)),
        });
        let trouble = write_back_trouble(&status, 6 * second).unwrap();
        assert_eq!((trouble.errno, trouble.failures), (Some(libc::ENOSPC), 3));
        let text = fault(&trouble, "/srv/a.raw").to_string();
        assert!(
            text.contains("/srv/a.raw for 5 s: No space left on device (errno 28)"),
            "{text}"
        );
    }
}
