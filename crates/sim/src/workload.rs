//! What simulated guests ask for: requests with the habits that break caches.
//!
//! Hot ranges written again and again, cold ones read once, long streams, requests smaller than a
//! block, requests across the end of a cache block, discards of much and of little.

use crate::content::SECTOR;
use crate::prng::Prng;
use crate::profile::Profile;
use hearth_engine::api::{DiskConfig, Home, Mode, ReqOp};

/// A request to be made; offset and length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// What.
    pub op: ReqOp,
    /// First byte, a multiple of 512.
    pub offset: u64,
    /// Bytes; a multiple of 512 unless it ends at the disk's end.
    pub len: u64,
    /// For writes: the payload is zeros.
    pub zeros: bool,
}

impl Wish {
    /// What was written is to be durable.
    pub fn flush() -> Wish {
        Wish {
            op: ReqOp::Flush,
            offset: 0,
            len: 0,
            zeros: false,
        }
    }
}

/// What is asked to be cached at once.
const FILL_BYTES: u64 = 128 * 4096;

/// How one guest behaves.
#[derive(Clone, Debug)]
pub struct Habits {
    reads: u32,
    writes: u32,
    hot_share: u64,
    big: u32,
    fua: u64,
    flushes: u32,
    odd: bool,
    cursor: u64,
    flood: Option<Flood>,
}

/// A guest that has its disk cached and then writes it over and over.
#[derive(Clone, Debug)]
struct Flood {
    /// Up to here it has asked for its disk to be cached, in bytes.
    filled: u64,
    /// Of it, so much, in 256ths.
    fill: u64,
    /// Of 100 requests, how many are no writes.
    others: u64,
    /// Of 100 writes, how many go to a fifth of the disk.
    skew: u64,
    /// Of 100 writes, how many are large.
    large: u64,
}

impl Flood {
    fn draw(rng: &mut Prng) -> Flood {
        Flood {
            filled: 0,
            fill: *rng.pick(&[0, 128, 192, 256]),
            others: *rng.pick(&[0, 5, 40]),
            skew: *rng.pick(&[0, 0, 80]),
            large: *rng.pick(&[0, 2, 8]),
        }
    }

    fn next(&mut self, rng: &mut Prng, size: u64) -> Wish {
        let wish = |op, offset: u64, len: u64| Wish {
            op,
            offset,
            len: len.min(size - offset),
            zeros: false,
        };
        if self.filled < size / 256 * self.fill {
            let at = self.filled;
            self.filled += FILL_BYTES;
            return wish(ReqOp::Prefetch, at, FILL_BYTES);
        }
        let blocks = size / 4096;
        let at = match rng.chance(self.skew, 100) {
            true => rng.below((blocks / 5).max(1)) * 4096,
            false => rng.below(blocks) * 4096,
        };
        if rng.chance(self.others, 100) {
            let discard = ReqOp::Discard { fua: false };
            let op = *rng.pick(&[ReqOp::Read, ReqOp::Read, ReqOp::Read, discard, ReqOp::Flush]);
            return match op {
                ReqOp::Flush => wish(op, 0, 0),
                _ => wish(op, at, rng.between(1, 4) * 4096),
            };
        }
        let len = match rng.chance(self.large, 100) {
            true => rng.between(64, 256),
            false => 1,
        };
        wish(ReqOp::Write { fua: false }, at, len * 4096)
    }
}

impl Habits {
    /// Habits drawn from the seed.
    pub fn draw(rng: &mut Prng, profile: &Profile) -> Habits {
        if rng.chance(profile.heavy, 100) {
            return Habits {
                reads: rng.between(5, 20) as u32,
                writes: rng.between(40, 80) as u32,
                hot_share: rng.between(0, 60),
                big: rng.between(8, 25) as u32,
                fua: 5,
                flushes: *rng.pick(&[0, 4]),
                odd: profile.odd && rng.chance(1, 2),
                cursor: 0,
                flood: None,
            };
        }
        Habits {
            reads: rng.between(10, 60) as u32,
            writes: rng.between(10, 60) as u32,
            hot_share: rng.between(20, 95),
            big: *rng.pick(&[0, 1, 3, 8]),
            fua: *rng.pick(&[0, 5, 30]),
            flushes: *rng.pick(&[0, 2, 8, 20]),
            odd: profile.odd && rng.chance(2, 3),
            cursor: 0,
            flood: profile.worn.then(|| Flood::draw(rng)),
        }
    }

    /// The next request for a disk of `size` bytes.
    pub fn next(&mut self, rng: &mut Prng, size: u64) -> Wish {
        if let Some(flood) = &mut self.flood {
            return flood.next(rng, size);
        }
        let fua = rng.chance(self.fua, 100);
        let op = match rng.weighted(&[self.reads, self.writes, self.flushes, 2, 2, 2]) {
            0 => ReqOp::Read,
            1 => ReqOp::Write { fua },
            2 => ReqOp::Flush,
            3 => ReqOp::Discard { fua },
            4 => ReqOp::WriteZeroes {
                fua,
                punch: rng.chance(1, 2),
            },
            _ => ReqOp::Prefetch,
        };
        if op == ReqOp::Flush {
            return Wish {
                op,
                offset: 0,
                len: 0,
                zeros: false,
            };
        }
        let mut len = self.length(rng);
        if matches!(op, ReqOp::Discard { .. } | ReqOp::WriteZeroes { .. }) && rng.chance(1, 6) {
            len = rng.between(1, 256) * 4096;
        }
        let offset = self.place(rng, size, len);
        let zeros = matches!(op, ReqOp::Write { .. }) && rng.chance(1, 25);
        let len = len.min(size - offset);
        // The part of a sector at the end of a disk of odd size goes only with its end.
        let len = if offset + len < size {
            (len / SECTOR * SECTOR).max(SECTOR).min(size - offset)
        } else {
            len
        };
        Wish {
            op,
            offset,
            len,
            zeros,
        }
    }

    fn length(&self, rng: &mut Prng) -> u64 {
        let small = if self.odd { 14 } else { 0 };
        match rng.weighted(&[small, 45, 25, 6, self.big]) {
            0 => rng.between(1, 24) * SECTOR,
            1 => 4096,
            2 => rng.between(1, 16) * 4096,
            3 => rng.between(1, 40) * 4096,
            _ => rng.between(64, 256) * 4096,
        }
    }

    fn place(&mut self, rng: &mut Prng, size: u64, len: u64) -> u64 {
        let unit = if self.odd && (len % 4096 != 0 || rng.chance(1, 20)) {
            SECTOR
        } else {
            4096
        };
        let units = size.div_ceil(unit);
        let at = match rng.below(10) {
            // A stream.
            0 | 1 => {
                let at = self.cursor;
                self.cursor = if at + len >= size { 0 } else { at + len };
                return at / unit * unit;
            }
            // The last blocks, where sizes go wrong.
            2 if rng.chance(1, 4) => units - 1 - rng.below(units.min(4)),
            _ if rng.chance(self.hot_share, 100) => rng.below((units / 8).max(1)),
            _ => rng.below(units),
        };
        at * unit
    }
}

/// A disk's settings drawn from the seed. `max_blocks` bounds its size, and `kept_blocks` that of one which lives
/// on flash.
pub fn draw_disk(
    rng: &mut Prng,
    profile: &Profile,
    id: u16,
    max_blocks: u64,
    kept_blocks: u64,
) -> DiskConfig {
    let blocks = rng.between(16, max_blocks);
    let mut size = blocks * 4096;
    let origin_align = if profile.odd && rng.chance(1, 3) {
        4096
    } else {
        512
    };
    if profile.odd && rng.chance(1, 3) {
        size -= rng.between(1, 7) * SECTOR;
        if rng.chance(1, 3) {
            size -= rng.between(1, 500);
        }
    }
    let home = match profile.homes {
        [_, 0, 0] => Home::Origin,
        homes => [Home::Origin, Home::Flash, Home::Scratch][rng.weighted(&homes)],
    };
    let mode = [
        Mode::WriteBack,
        Mode::WriteThrough,
        Mode::WriteAround,
        Mode::Off,
    ][rng.weighted(&profile.modes)];
    let mode = match mode {
        Mode::WriteBack if profile.ordered => Mode::WriteBackOrdered,
        mode => mode,
    };
    if home != Home::Origin {
        // Promised as a whole, and there is no origin that another mode would write.
        size = size.min(kept_blocks * 4096);
        return DiskConfig {
            id,
            size,
            origin_align,
            mode: Mode::WriteBack,
            block_size: 4096,
            min_bytes: 0,
            max_bytes: 0,
            seq_cutoff: *rng.pick(&[0, 64 << 10]),
            read_only: false,
            home,
        };
    }
    DiskConfig {
        id,
        size,
        origin_align,
        mode,
        block_size: *rng.pick(&[4096, 4096, 8192, 16384, 65536, 1 << 20]),
        min_bytes: 0,
        max_bytes: *rng.pick(&[0, 0, 1 << 20, 4 << 20]),
        seq_cutoff: *rng.pick(&[0, 0, 256 << 10]),
        read_only: false,
        home,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::PROFILES;

    #[test]
    fn wishes_stay_inside_the_disk_and_on_sectors() {
        let mut rng = Prng::new(11);
        for round in 0..200 {
            let profile = &PROFILES[round % PROFILES.len()];
            let disk = draw_disk(&mut rng, profile, 1, 300, 200);
            let mut habits = Habits::draw(&mut rng, profile);
            for _ in 0..200 {
                let wish = habits.next(&mut rng, disk.size);
                let end = wish.offset + wish.len;
                assert!(end <= disk.size, "{wish:?} in {}", disk.size);
                assert!(
                    wish.offset % SECTOR == 0 && (end % SECTOR == 0 || end == disk.size),
                    "{wish:?}"
                );
                assert!(wish.op == ReqOp::Flush || wish.len > 0, "{wish:?}");
            }
        }
    }
}
