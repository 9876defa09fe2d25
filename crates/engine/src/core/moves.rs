//! What eviction moves: blocks read from the segment that goes, on their way to another.

use crate::cache::index::SlotNo;
use crate::core::Core;
use crate::core::apply::{Apply, Purpose, Then};
use crate::core::left::Unread;
use crate::faults::Fault;
use crate::paths::{Path, took};
use hearth_format::Kind;
use hearth_io::IoDone;
use hearth_io::checksum::crc32c;
use hearth_policy::Verdict;

impl Core {
    /// A read of consecutive slots that are to be moved has ended.
    pub fn move_read_done(&mut self, slot: SlotNo, n: u32, done: IoDone, now: u64) {
        self.flash.move_read_ended(slot, n);
        let data = done.op.bufs.first();
        let data = data.expect("a read comes back with its memory");
        for i in 0..n {
            // A write or a discard may have taken its place meanwhile.
            let Some(info) = self.cache.index.slot(slot + i) else {
                continue;
            };
            let (disk, block) = (info.key.disk(), info.key.block());
            let superseding = self.superseding(disk, block, block + 1)
                && !self.opts.faults.has(Fault::MoveSuperseded);
            let reseal = self.opts.faults.has(Fault::ResealRot);
            let (unread, bad) = (
                done.result.is_err(),
                done.bad_blocks.contains(&i) && !reseal,
            );
            // One that is known to be lost is moved with a checksum that never matches.
            self.flash.note_rot(u64::from(bad && !info.lost));
            // What is lost is lost whether the device says so or not.
            let rotten = info.dirty && (bad || unread && info.lost);
            if rotten && !superseding && self.flash.takes_writes() {
                took(if info.lost {
                    Path::LostMoved
                } else {
                    Path::RottenMoved
                });
                self.lose(disk, block, slot + i);
            } else if bad
                || unread
                || !self.flash.takes_writes()
                || superseding
                || !info.dirty && self.known(disk).may_differ()
            {
                self.cache.index.set_mark(slot + i, false);
                if info.dirty {
                    self.ready.touch(disk);
                }
                // What a device that does not answer holds is not known to be bad.
                if unread && !done.is_overdue() && info.dirty && !superseding {
                    self.strike(disk, block, slot + i, Unread { alone: n == 1 }, now);
                }
                if (bad || unread) && !info.dirty {
                    self.forget_block(disk, block);
                    self.known_mut(disk).counters.bad_clean_blocks += 1;
                    // A record behind the newer one would void that.
                    if !superseding {
                        self.record_drop(disk, block, 1);
                    }
                }
                continue;
            }
            let fades = self.flash.fades(self.flash.log.segment_of(slot) as u32);
            let d = self.known_mut(disk);
            d.counters.reinsertions += 1;
            let freq = match self.cache.policy.evict(info.freq as u8) {
                // It will be judged when it is clean, or when there is not room for all.
                _ if info.dirty || !fades => info.freq as u8,
                Verdict::Keep { freq } => freq,
                Verdict::Drop => 0,
            };
            let data = data.sub(i as usize * 4096, 4096);
            // What is lost is moved with a checksum that no read accepts, and that tells recovery
            // all the same that the batch is whole (docs/format.md).
            let crc = match rotten {
                true => !crc32c(data.bytes()),
                false if reseal => crc32c(data.bytes()),
                false => self.cache.index.crc(slot + i),
            };
            let kind = if info.dirty { Kind::Dirty } else { Kind::Clean };
            let token = Purpose {
                apply: Apply::Move {
                    old: slot + i,
                    dirty: info.dirty,
                    freq,
                },
                then: Then::Moved,
            };
            self.flash
                .append_moved(kind, (disk, block), slot + i, data, crc, token);
        }
        let waited_for = !self.reqs.stalled.is_empty() || !self.reqs.stalled_through.is_empty();
        self.flash.moves_go_on(waited_for);
    }
}
