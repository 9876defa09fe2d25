//! A device is lost, and the pool goes on with what the others hold.
//!
//! Who closes the pool, or looks at how it was closed, has seen to it that a checkpoint tells what of the others counts, and that nothing on
//! the lost device is the only copy of anything. What is left is to list the devices that there are. The danger is what the *log*
//! says on the others: an older copy there may have been made void by something that only the lost device knew. So the same store of the
//! superblock, the switch, raises the floor of the log ([`floor_of_log`](Superblock::floor_of_log)) above all that was written so far. From then
//! on only the checkpoint vouches for it; after a crash it is gone, which costs warmth and nothing else.

use super::{Failed, load_map, switch, with_less};
use crate::devices::Members;
use crate::error::FormatError;
use crate::map::MapEntry;
use crate::superblock::{INCOMPAT_FLOOR, INCOMPAT_MAP, PoolState, Superblock};
use hearth_io::Media;

/// Takes the device of this place out of the pool, which was closed in order, without asking it for anything. `devices` are the others in
/// their order, `floor` the number of the next segment, as the checkpoint has it.
pub fn go_on_without<M: Media>(
    devices: &mut [M],
    place: usize,
    floor: u64,
) -> Result<Superblock, Failed> {
    let mut found = Vec::new();
    for (media, at) in devices.iter_mut().zip(0..) {
        found.push(Superblock::load(media).map_err(|e| (at, e))?);
    }
    let refused = |why| (0, FormatError::unfit("pool", why));
    if found.is_empty() {
        return Err((0, FormatError::NotAPool));
    }
    let mut lead = found.remove(0);
    if !matches!(lead.state, PoolState::Clean { .. }) {
        return Err(refused("it was not closed in order"));
    }
    if lead.is_twice() || lead.incompat & INCOMPAT_MAP == 0 {
        return Err(refused("it cannot go on without a device in this way"));
    }
    if !lead.areas.is_empty() {
        return Err(refused("a part of it is set aside, as for swap"));
    }
    check_rest(&lead, &found, place)?;
    if lead.next_stamp != 0 {
        finish_opening(&mut lead, &mut found, place, devices)?;
    }
    let mut next = with_less(&lead, place).map_err(|e| (0, e))?;
    next.log_floor = lead.log_floor.max(floor);
    next.incompat |= INCOMPAT_FLOOR;
    let [first, ..] = devices else {
        return Err((0, FormatError::NotAPool));
    };
    store_map(&lead, &next, first).map_err(|e| (0, e))?;
    switch(&lead, next, &mut Members::new(found), devices)
}

/// An opening was cut off: gives those their new stamp that do not have it, and then the first.
fn finish_opening<M: Media>(
    lead: &mut Superblock,
    others: &mut [Superblock],
    place: usize,
    devices: &mut [M],
) -> Result<(), Failed> {
    for (at, (sb, media)) in (1..).zip(others.iter_mut().zip(devices.iter_mut().skip(1))) {
        if sb.stamp != lead.next_stamp {
            let listed = if at < place { at } else { at + 1 };
            *sb = lead.of_member(listed as u16, sb, lead.next_stamp);
            sb.store(media).map_err(|e| (at, e))?;
        }
    }
    (lead.stamp, lead.next_stamp) = (lead.next_stamp, 0);
    match devices.first_mut() {
        Some(first) => lead.store(first).map_err(|e| (0, e)),
        None => Err((0, FormatError::NotAPool)),
    }
}

/// Are the others those that the first one lists, each as old as it is?
fn check_rest(lead: &Superblock, others: &[Superblock], place: usize) -> Result<(), Failed> {
    let mut list = lead.all_devices();
    let unfit = |why| FormatError::unfit("pool", why);
    if lead.device_index != 0 || place == 0 || place >= list.len() {
        return Err((0, unfit("its first device cannot be left behind")));
    }
    list.remove(place);
    if list.len() != others.len() + 1 {
        return Err((0, unfit("more than one of its devices is missing")));
    }
    let current = [lead.stamp, lead.next_stamp];
    for (at, (sb, entry)) in others.iter().zip(list.iter().skip(1)).enumerate() {
        if sb.pool != lead.pool || sb.device != entry.device || !current.contains(&sb.stamp) {
            return Err((
                at + 1,
                unfit("it is not the device that is listed, or older"),
            ));
        }
    }
    Ok(())
}

/// Writes the map for the next layout to its place. It names nothing: what was written so far lies below the floor.
fn store_map<M: Media>(
    lead: &Superblock,
    next: &Superblock,
    media: &mut M,
) -> Result<(), FormatError> {
    let mut map = load_map(lead, media)?;
    let count = next.layout.segment_count;
    map.entries = vec![MapEntry::default(); count as usize];
    (map.header.segments, map.header.generation) = (count, map.header.generation + 1);
    if lead.layout == next.layout {
        // It lies where the one lies that counts, and says the same of a log below the floor.
        return Ok(());
    }
    map.store(media, &next.layout)
        .map_err(|source| FormatError::Io {
            doing: "writing the map of the segments",
            source,
        })
}
