//! Advice, as reported: what more or less flash would do for a disk.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::types::CacheMode;

/// A size and what it is expected to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Expected {
    /// Bytes of flash.
    pub bytes: u64,
    /// Share of the blocks read that come from flash.
    pub hit_ratio: f64,
    /// The same if Hearth were an LRU cache.
    #[serde(default)]
    pub lru_hit_ratio: f64,
    /// Mean latency of reads, microseconds.
    pub latency_us: f64,
    /// Blocks written to flash for each block that the guest writes, in write-back; absent while too little
    /// was written, and for sizes that no miniature of was ever full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_writes: Option<f64>,
}

/// A point of a miss-ratio curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CurvePoint {
    /// Bytes of flash.
    pub bytes: u64,
    /// Share of the blocks read that come from flash.
    pub hit_ratio: f64,
}

/// Another setting than the present one, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Suggestion<T> {
    /// As it is.
    pub now: T,
    /// As it should be; may be the same.
    pub advised: T,
    /// Why.
    pub because: String,
}

/// What is advised for a disk. Nothing but `reason` is there until enough was read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Advice {
    /// The disk.
    pub name: String,
    /// Why there is no advice (yet).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Seconds the curve looks back, older ones counted less.
    pub seconds: f64,
    /// Bytes read per second over that time.
    pub bytes_per_second: f64,
    /// Bytes of all different blocks read or written: the working set.
    pub working_set: u64,
    /// Share of bytes read that did come from flash in the last hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_hit_ratio: Option<f64>,
    /// Bytes written to flash for each byte that the guest wrote, since the daemon started: what it wrote,
    /// what misses brought and what was appended again, with their part of the log's own. Absent if it wrote nothing, or
    /// the mode is not write-back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_flash_writes: Option<f64>,
    /// Mean latency of a hit, microseconds.
    pub hit_us: f64,
    /// Mean latency of a miss, microseconds.
    pub miss_us: f64,
    /// One of the two is not measured yet on this disk, but another disk's or a guess.
    pub latency_guessed: bool,
    /// What it has on flash now.
    pub present: Expected,
    /// Up to where another GiB raises the hit ratio by at least one point.
    pub advised: Expected,
    /// Where the curve bends most; absent if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub knee: Option<Expected>,
    /// Its part when the pool is divided so that the last GiB saves every disk the same time.
    pub share: Expected,
    /// Cache block size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<Suggestion<u64>>,
    /// Cache mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Suggestion<CacheMode>>,
    /// The curve and all that follows from it are of Hearth's own rules, in miniature; as long as too little
    /// was seen for that, of an LRU cache.
    #[serde(default)]
    pub own_rules: bool,
    /// Hit ratio over size; at most 200 points.
    pub curve: Vec<CurvePoint>,
}

/// Advice for the disks asked about.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AdviceReport {
    /// Bytes of flash for cached data.
    pub capacity: u64,
    /// Bytes of it nobody would gain from.
    pub left_over: u64,
    /// The disks, by name.
    pub disks: Vec<Advice>,
    /// Files of datastores, those in use and a few that were used lately: called as the datastore and the path in it. What was
    /// measured of them is so since they were first used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<Advice>,
    /// Bytes kept for disks as of now, where advice was applied: name and bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub applied: Vec<Applied>,
}

/// Advice that was applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Applied {
    /// The disk.
    pub name: String,
    /// Bytes of flash kept for it from now on.
    pub kept: u64,
}
