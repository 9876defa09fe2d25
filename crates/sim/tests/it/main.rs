//! Integration tests of `hearth-sim`, one module per subject.

mod common;
mod grown;
mod judge;
mod life;
mod played;

mod aftermath;
mod agree;
mod away;
mod counts;
mod crowded;
mod duties;
mod evicted;
mod fenced;
mod fills;
mod flash_gone;
mod flood;
mod flush_bound;
mod gone;
mod halves;
mod live;
mod maximum;
mod mutations;
mod ordering;
mod overwrites;
mod reopen;
mod rescued;
mod seeds;
mod single;
mod stale;
mod starved;
mod tampered;
