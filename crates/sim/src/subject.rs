//! The seam between the simulator and what it tests.
//!
//! The world talks to a [`Subject`]: the real engine, or a toy that breaks one rule on purpose
//! and so proves that the simulator notices.

use crate::media::SimMedia;
use crate::mirrored::LegFault;
use hearth_engine::Upto;
use hearth_engine::api::{DiskConfig, DiskId, Effects, Home, Mode, OriginState, Request};
use hearth_format::areas::AreaPlace;
use hearth_io::{IoDone, Media, Spread};

/// A disk the registry knows, and since when: records of the same id from before are another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Number within the pool.
    pub id: DiskId,
    /// Its size in bytes.
    pub size: u64,
    /// The log's sequence number when the disk was created.
    pub since_seq: u64,
    /// Where its data lives.
    pub home: Home,
    /// It is ordered.
    pub ordered: bool,
}

/// The parts of a world the subject must know to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks per segment of the log.
    pub segment_blocks: u32,
    /// Drives choices inside the subject that production takes from entropy.
    pub seed: u64,
}

/// What of a disk is not on its origin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unsaved {
    /// Blocks that are newer on flash.
    pub dirty: u64,
    /// Those of them that are listed as lost, in ascending order.
    pub lost: Vec<u64>,
}

/// What happens to a pool's flash devices while nobody serves it. Numbers are their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reshape {
    /// The last of those given comes.
    Add,
    /// The last of those given takes the place of this one.
    Replace(usize),
    /// This one goes.
    Remove(usize),
}

/// How a device of a pool that keeps everything twice is copied while the pool is served.
#[derive(Clone, Debug)]
pub struct CopyPlan {
    /// Of each of its segments: the number that the log has for it, and where it is read: the device's place, and the offset.
    pub segments: Vec<(u32, (u16, u64))>,
    /// Bytes of a segment.
    pub bytes: u64,
    /// Where they begin on the new one.
    pub to: u64,
    /// Devices that are lost, as the bits of their places.
    pub lost: u64,
}

/// How a device of such a pool is replaced.
#[derive(Clone, Debug, Default)]
pub struct Replacement {
    /// The place of the one that goes.
    pub place: usize,
    /// Devices that are lost, as the bits of their places.
    pub lost: u64,
    /// Of each of its segments that the new one has a durable copy of: what was told of it when it was copied.
    pub copied: Vec<Option<u64>>,
    /// What is told of each now.
    pub touched: Vec<Option<u64>>,
    /// The new one's number.
    pub seed: u64,
}

/// Something that behaves like the engine: see `hearth_engine` for what the calls mean.
pub trait Subject {
    /// Disks of which the start dropped everything.
    fn dropped(&self) -> Vec<DiskId> {
        Vec::new()
    }
    /// Puts a disk into service.
    fn attach(&self, config: DiskConfig, origin: OriginState) -> Result<(), String>;
    /// Takes a disk out of service. False: something of it is in flight, try again.
    fn detach(&self, id: DiskId) -> Result<bool, String>;
    /// Drops everything cached of a detached disk and returns the new [`Known::since_seq`] for
    /// its id. `None`: busy, try again.
    fn forget(&self, id: DiskId, effects: &mut Effects) -> Result<Option<u64>, String>;
    /// Forgets that a disk exists whose everything was dropped. False: it is served, or busy.
    fn remove(&self, id: DiskId) -> Result<bool, String>;
    /// Changes the cache mode.
    fn set_mode(&self, id: DiskId, mode: Mode) -> Result<(), String>;
    /// The number below which records of a disk that is off and clean may be void. `None`: not now.
    fn log_free_seq(&self, _id: DiskId) -> Option<u64> {
        None
    }
    /// That is stored: the disk takes no step that waits for the log.
    fn set_log_free(&self, _id: DiskId, _seq: u64, _now_ns: u64, _effects: &mut Effects) {}
    /// Changes the limits, in bytes of flash.
    fn set_limits(&self, id: DiskId, min: u64, max: u64) -> Result<(), String>;
    /// Tells of a grown origin. False: busy, try again.
    fn set_size(&self, id: DiskId, size: u64) -> Result<bool, String>;
    /// Gives a disk that lives on flash an origin of zeros, or says that its origin has it all. False: not now, try again.
    fn rehome(&self, _id: DiskId, _home: Home) -> Result<bool, String> {
        Ok(false)
    }
    /// Holds a disk on flash that is promised room there. False: not now, or not possible.
    fn hold(&self, _id: DiskId) -> Result<bool, String> {
        Ok(false)
    }
    /// Is it held?
    fn is_held(&self, _id: DiskId) -> bool {
        false
    }
    /// Has flash all of it, durably? None: something has still to be kept.
    fn is_whole(&self, _id: DiskId) -> Result<Option<bool>, String> {
        Ok(None)
    }
    /// The first bytes that flash does not have as the disk's own, or how far there are none.
    fn unkept(&self, _id: DiskId, _offset: u64, end: u64) -> Result<(u64, u64), u64> {
        Err(end)
    }
    /// Starts or stops writing back everything dirty at full speed.
    fn drain(&self, id: DiskId, on: bool) -> Result<(), String>;
    /// True if nothing of the disk is dirty: the origin alone is the disk.
    fn clean(&self, id: DiskId) -> bool;
    /// Dirty blocks, and those of them listed as lost.
    fn unsaved(&self, _id: DiskId) -> Unsaved {
        Unsaved::default()
    }
    /// Blocks the origin does not have yet, in ascending order.
    fn owed(&self, _id: DiskId) -> Vec<u64> {
        Vec::new()
    }
    /// Clean cached blocks of a range, in order, with their checksums, and whether the guest wrote them.
    fn clean_sums(&self, _id: DiskId, _offset: u64, _len: u64) -> Vec<(u64, u32, bool)> {
        Vec::new()
    }
    /// Says whether the clean copies of a disk equal its origin.
    fn set_verified(&self, _id: DiskId, _verified: bool) {}
    /// Drops the clean copies of a disk that is served. False: not now, try again.
    fn drop_clean(&self, _id: DiskId) -> Result<bool, String> {
        Ok(true)
    }
    /// Drops clean copies from `offset` on that do not have these checksums.
    fn drop_unlike(&self, _id: DiskId, _offset: u64, _right: &[u32]) {}
    /// Nothing of it is on flash that its origin lacks, nor will be of what was asked so far.
    fn whole(&self, _id: DiskId) -> bool {
        false
    }
    /// How far the origin of an ordered disk is; `None` of any other disk.
    fn order(&self, _id: DiskId, _now_ns: u64) -> Option<Upto> {
        None
    }
    /// Says how far behind the origin of an ordered disk may be.
    fn set_max_age(&self, _id: DiskId, _ns: u64) -> Result<(), String> {
        Ok(())
    }
    /// Gives up what is listed as lost.
    fn accept_loss(&self, _id: DiskId) -> Result<(), String> {
        Ok(())
    }
    /// Stops (or resumes) background work, before a close.
    fn quiesce(&self, on: bool);
    /// True when no request and no I/O is in flight.
    fn idle(&self) -> bool;
    /// A clean stop.
    fn close(self: Box<Self>, media: &mut dyn Media) -> Result<(), String>;
    /// The same, and then what [`touched`](Self::touched) says of these segments.
    fn close_telling(
        self: Box<Self>,
        media: &mut dyn Media,
        segments: &[u32],
    ) -> (Result<(), String>, Vec<Option<u64>>) {
        (self.close(media), vec![None; segments.len()])
    }
    /// Something that changes with everything that is written to a segment; none while something is on its way there.
    fn touched(&self, _segment: u32) -> Option<u64> {
        None
    }
    /// Requests arrived.
    fn submit(&self, now_ns: u64, requests: &mut Vec<Request>, effects: &mut Effects);
    /// I/O ended.
    fn io_done(&self, now_ns: u64, done: &mut Vec<IoDone>, effects: &mut Effects);
    /// Time passed. Returns when to call again at the latest.
    fn tick(&self, now_ns: u64, effects: &mut Effects) -> Option<u64>;
    /// Begins to empty a flash device. False: it cannot be now.
    fn empty_device(&self, _device: u16) -> bool {
        false
    }
    /// Is one being emptied, or empty?
    fn is_emptying(&self) -> bool {
        false
    }
    /// The device that was emptied, if nothing is left on it.
    fn emptied(&self) -> Option<u16> {
        None
    }
    /// The device is used as before.
    fn use_device_again(&self) {}
    /// Begins to empty segments at the end of a flash device, so that they can be set aside. False: it cannot be now.
    fn begin_area(&self, _device: u16, _segments: u32) -> bool {
        false
    }
    /// Sets aside what was emptied.
    fn keep_area(&self) -> bool {
        false
    }
    /// Gives an area back.
    fn give_area_back(&self, _area: AreaPlace) -> bool {
        false
    }
    /// If one that is given back is clear: nobody writes there.
    fn end_clearing(&self) {}
    /// Is one being set aside, or given back?
    fn is_area_changed(&self) -> bool {
        false
    }
    /// What is set aside.
    fn areas(&self) -> Vec<AreaPlace> {
        Vec::new()
    }
    /// True once the subject no longer uses flash because it failed too often.
    fn gave_up_flash(&self) -> bool {
        false
    }
    /// Counts again whatever it keeps count of: how many requests are in flight, or what it has counted wrongly.
    fn check(&self, open: u64) -> Result<u64, String> {
        Ok(open)
    }
    /// True once flash took no note of having been given up, so that somebody else has to take it.
    fn failure_is_unnoted(&self) -> bool {
        false
    }
    /// Says that the next start will know from elsewhere that flash was given up.
    fn failure_is_noted_elsewhere(&self, _now_ns: u64, _effects: &mut Effects) {}
    /// The flash device that failed alone, if the pool could go on without it.
    fn failed_alone(&self) -> Option<u16> {
        None
    }
    /// Is there something that keeps it from that?
    fn hindered(&self) -> bool {
        true
    }
    /// Blocks cached on the others.
    fn kept_without(&self) -> u64 {
        0
    }
    /// A clean stop after which the pool goes on without that device.
    fn close_without(self: Box<Self>, _media: &mut dyn Media) -> Result<(), String> {
        Err("this subject needs all of its devices".into())
    }
    /// Did it find what a clean stop had left?
    fn used_checkpoint(&self) -> bool {
        false
    }
    /// Blocks cached on flash.
    fn cached_blocks(&self) -> u64 {
        0
    }
    /// Internal state worth seeing when something went wrong.
    fn describe(&self) -> String {
        String::new()
    }
}

const STAY: &str = "this subject's devices stay";

/// Formats and opens subjects.
pub trait Maker: Sync {
    /// Takes out of a disk's settings what this kind of subject does not support.
    fn tune(&self, _config: &mut DiskConfig) {}
    /// How mirrors under it are broken on purpose.
    fn leg_fault(&self) -> LegFault {
        LegFault::None
    }
    /// Prepares an empty device.
    fn format(&self, media: &mut dyn Media, shape: Shape) -> Result<(), String>;
    /// Prepares several empty devices as one pool, which may keep everything `twice`.
    fn format_several(
        &self,
        _devices: &mut [SimMedia<'_>],
        _shape: Shape,
        _twice: bool,
    ) -> Result<(), String> {
        Err("this subject knows one device only".into())
    }
    /// Looks at formatted devices before they are opened, and does what has to be done to several: says where
    /// on them what lies.
    fn join(&self, _devices: &mut [SimMedia<'_>]) -> Result<Spread, String> {
        Ok(Spread::one())
    }
    /// Changes which devices are the pool. For [`Reshape::Add`] and [`Reshape::Replace`] the last one is not of it yet.
    fn reshape(
        &self,
        _devices: Vec<SimMedia<'_>>,
        _what: Reshape,
        _seed: u64,
    ) -> Result<(), String> {
        Err(STAY.into())
    }
    /// Takes a device out of the pool that is lost, and was closed for that. `devices` are the others in their order.
    fn go_on_without(&self, _devices: Vec<SimMedia<'_>>, _place: usize) -> Result<(), String> {
        Err(STAY.into())
    }
    /// Are these of the devices, in this order, the pool?
    fn is_pool(&self, _devices: &mut [SimMedia<'_>], _list: &[usize]) -> bool {
        true
    }
    /// Finishes the replacement of the first device by the last one.
    fn finish(&self, _devices: &mut [SimMedia<'_>]) -> Result<(), String> {
        Err(STAY.into())
    }
    /// Which devices of a pool that keeps everything twice are lost, or are not among these, as the bits of their places.
    fn lost(&self, _devices: &mut [SimMedia<'_>]) -> Result<u64, String> {
        Err(STAY.into())
    }
    /// The number of the device that such a pool has in a place, by what the others say.
    fn listed(&self, _devices: &mut [SimMedia<'_>], _place: usize) -> Result<u128, String> {
        Err(STAY.into())
    }
    /// How a device of such a pool is copied while it is served.
    fn copy_plan(&self, _devices: &mut [SimMedia<'_>], _place: usize) -> Result<CopyPlan, String> {
        Err(STAY.into())
    }
    /// Puts `new` into the place of a device of such a pool.
    fn replace_half(
        &self,
        _devices: Vec<SimMedia<'_>>,
        _new: SimMedia<'_>,
        _what: &Replacement,
    ) -> Result<(), String> {
        Err(STAY.into())
    }
    /// Says a formatted device that it was given up?
    fn was_given_up(&self, _media: &mut dyn Media) -> bool {
        false
    }
    /// Opens a formatted one: after a clean stop, or a crash.
    fn open(
        &self,
        media: &mut dyn Media,
        shape: Shape,
        known: &[Known],
    ) -> Result<Box<dyn Subject>, String>;
}
