//! A pool that keeps everything twice, as whoever starts it and replaces its devices does it.
//!
//! What the daemon has to do for that is little, and each of it can be forgotten: to ask the superblocks which devices are the
//! pool, to look whether a copy that was made while the pool was served is still good, and to make it durable. So it is here in the
//! same steps, and can be left out on purpose.

use super::Real;
use crate::media::SimMedia;
use crate::subject::{CopyPlan, Replacement};
use hearth_format::change::{self, Newcomer};
use hearth_format::devices::{Together, judge_twice};
use hearth_format::{Superblock, Uuid};
use hearth_io::{BLOCK, Joined, Media, Spread};
use std::io;

/// How the replacement of a device is broken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HalfFault {
    /// It is not.
    #[default]
    None,
    /// A device that was replaced is believed when it is there in the place of the new one.
    BelieveReplaced,
    /// A segment that was written to since it was copied is not copied again.
    TrustOldCopy,
    /// The last segments are not copied.
    CopyCutShort,
    /// What is written to the new device is not made durable.
    NewUnflushed,
}

impl HalfFault {
    /// Each of them, and its name.
    pub const ALL: [(HalfFault, &str); 4] = [
        (HalfFault::BelieveReplaced, "BelieveReplacedDevice"),
        (HalfFault::TrustOldCopy, "TrustOldCopy"),
        (HalfFault::CopyCutShort, "CopyCutShort"),
        (HalfFault::NewUnflushed, "NewDeviceUnflushed"),
    ];
}

/// What can be read of them.
fn found(devices: &mut [SimMedia<'_>]) -> Vec<Superblock> {
    let each = devices.iter_mut().map(|d| Superblock::load(d).ok());
    each.flatten().collect()
}

fn together(found: &[Superblock]) -> Result<Together, String> {
    judge_twice(found).map_err(|e| {
        let said = |sb: &Superblock| {
            (
                sb.device_index,
                sb.generation,
                sb.stamp,
                sb.next_stamp,
                sb.lost,
            )
        };
        let said: Vec<_> = found.iter().map(said).collect();
        format!("{e:?}; place, generation, stamps and who is lost: {said:?}")
    })
}

/// Whoever stands in the place of one that is listed is taken for it.
fn believe_replaced(found: &mut [Superblock]) {
    let knows = |sb: &&Superblock| (sb.stamp.max(sb.next_stamp), sb.generation);
    let leads = found.iter().filter(|sb| sb.device_index < 2);
    let Some(lead) = leads.max_by_key(knows).cloned() else {
        return;
    };
    for n in 0..found.len() {
        let (place, device) = (found[n].device_index, found[n].device);
        let entry = lead.devices.get(usize::from(place));
        if lead.devices.iter().any(|d| d.device == device) {
            continue;
        }
        let Some(entry) = entry else {
            continue;
        };
        found[n] = Superblock {
            device_index: place,
            device: entry.device,
            ..lead.clone()
        };
        for sb in found.iter_mut() {
            sb.lost &= !(1 << place);
        }
    }
}

/// A device, whose flushes may be left out.
struct Flushed<'a> {
    media: SimMedia<'a>,
    left_out: bool,
}

impl Media for Flushed<'_> {
    fn len(&self) -> u64 {
        self.media.len()
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.media.read_at(offset, data)
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.media.write_at(offset, data)
    }
    fn flush(&mut self) -> io::Result<()> {
        match self.left_out {
            true => Ok(()),
            false => self.media.flush(),
        }
    }
}

impl Real {
    /// Gives the devices that are there their stamp, and says what lies where. `None`: the pool keeps nothing twice.
    pub(super) fn join_twice(
        &self,
        devices: &mut [SimMedia<'_>],
    ) -> Result<Option<Spread>, String> {
        let mut found = found(devices);
        if !found.iter().any(Superblock::is_twice) {
            return Ok(None);
        }
        if self.believe_lost {
            let stamp = found.iter().map(|sb| sb.stamp).max().unwrap_or(0);
            for sb in &mut found {
                (sb.lost, sb.stamp, sb.next_stamp) = (0, stamp, 0);
            }
        }
        if self.halves == HalfFault::BelieveReplaced {
            believe_replaced(&mut found);
        }
        let together = together(&found)?;
        let (mut members, mut lead) = (together.members(&found), together.lead);
        let spread = lead.spread();
        let mut joined = Joined::new(spread.clone(), devices.iter_mut().collect());
        let stamped = members.stamp_twice(&mut lead, &mut joined);
        stamped.map_err(|e| e.to_string())?;
        Ok(Some(spread))
    }

    pub(super) fn lost_of(&self, devices: &mut [SimMedia<'_>]) -> Result<u64, String> {
        Ok(together(&found(devices))?.lead.lost)
    }

    pub(super) fn listed_at(
        &self,
        devices: &mut [SimMedia<'_>],
        place: usize,
    ) -> Result<u128, String> {
        let others = devices.iter_mut().enumerate().filter(|(n, _)| *n != place);
        let found: Vec<_> = others
            .filter_map(|(_, d)| Superblock::load(d).ok())
            .collect();
        let lead = together(&found)?.lead;
        let entry = lead.devices.get(place).ok_or("there is no such place")?;
        Ok(entry.device.as_u128())
    }

    pub(super) fn plan_of(
        &self,
        devices: &mut [SimMedia<'_>],
        place: usize,
    ) -> Result<CopyPlan, String> {
        let lead = together(&found(devices))?.lead;
        let bytes = u64::from(lead.layout.segment_blocks) * BLOCK;
        let own = lead.devices.get(place).ok_or("there is no such place")?;
        let own = own.extent.segment_start * BLOCK;
        let numbers = lead.segments().get(place).cloned().unwrap_or(0..0);
        let is_lost = lead.lost & (1 << place) != 0;
        let segments = numbers.zip(0..).map(|(number, seg)| {
            let in_log = number % lead.layout.segment_count.max(1);
            let from = match is_lost {
                true => change::other_half(&lead, place, seg).ok_or("there is no other half")?,
                false => (place as u16, own + u64::from(seg) * bytes),
            };
            Ok::<_, String>((in_log, from))
        });
        Ok(CopyPlan {
            segments: segments.collect::<Result<_, _>>()?,
            bytes,
            to: change::begin_of(&lead, place) * BLOCK,
            lost: lead.lost,
        })
    }

    pub(super) fn replace(
        &self,
        devices: Vec<SimMedia<'_>>,
        new: SimMedia<'_>,
        what: &Replacement,
    ) -> Result<(), String> {
        let there = devices.into_iter().map(|media| Flushed {
            media,
            left_out: false,
        });
        let mut there: Vec<Flushed<'_>> = there.collect();
        let mut new = Flushed {
            media: new,
            left_out: self.halves == HalfFault::NewUnflushed,
        };
        let newcomer = Newcomer {
            device: Uuid::from_u128(u128::from(what.seed) << 64 | 2),
            now_unix_s: 1,
        };
        // What was changed since it was copied is copied when nobody writes any more.
        let copied = |segment: u32| {
            let at = segment as usize;
            let (copied, now) = (what.copied.get(at), what.touched.get(at));
            match self.halves {
                HalfFault::CopyCutShort => segment > 3,
                HalfFault::TrustOldCopy => copied.is_some_and(Option::is_some),
                _ => copied.is_some_and(Option::is_some) && copied == now,
            }
        };
        let done = change::replace_half(
            &mut there,
            what.place,
            what.lost,
            &mut new,
            newcomer,
            &copied,
            &mut |_, _| true,
        );
        done.map(drop)
            .map_err(|(place, e)| format!("device {place}: {e}"))
    }
}
