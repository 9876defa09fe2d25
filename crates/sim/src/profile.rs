//! What kind of trouble a world gets.
//!
//! One mix of everything finds little: a device that fails hides the bugs of one that crashes.
//! So a profile names the hardships; `mixed` lets the seed choose one of the others.

use crate::prng::Prng;

/// Hardships of a world and the shape of its work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Name on the command line.
    pub name: &'static str,
    /// What it is for, in one line.
    pub about: &'static str,
    /// Weights of write-back, write-through, write-around and off for a disk's mode.
    pub modes: [u32; 4],
    /// Weights of disks with an origin, of those that live on flash, and of those of which a crash leaves nothing.
    pub homes: [u32; 3],
    /// Runs between crashes or stops.
    pub lives: (u64, u64),
    /// Requests per life.
    pub requests: (u64, u64),
    /// Of 100 lives but the last, how many end in a crash rather than a clean stop.
    pub crash: u64,
    /// In 10 000 operations: reads, writes, flushes of an origin that fail.
    pub origin_eio: u32,
    /// In 10 000 operations: reads of flash that fail.
    pub flash_read_eio: u32,
    /// In 10 000 operations: writes and flushes of flash that fail.
    pub flash_write_eio: u32,
    /// In 10 000 operations: slow ones; a tenth as many hang.
    pub slow: u32,
    /// In 1000 steps: a block of flash rots.
    pub rot: u64,
    /// The flash device dies once.
    pub flash_death: bool,
    /// The flash device is erased once under the pool.
    pub flash_erased: bool,
    /// In 1000 steps: modes, limits, sizes, drains and disks change.
    pub change: u64,
    /// Origins store 512-byte sectors one by one.
    pub sector_origins: bool,
    /// Requests smaller than a block and disks of odd size.
    pub odd: bool,
    /// In 10 000 operations of an origin: ones that hang for long.
    pub hang: u32,
    /// In 10 000 operations of flash: the same.
    pub flash_hang: u32,
    /// Of 100 that hang, those that are answered for after a while.
    pub overdue: u32,
    /// Of 100 starts, after how many everything is read.
    pub verify: u64,
    /// In 10 000 steps: time passes at once, as for a machine that slept.
    pub sleeps: u64,
    /// In 1000 steps: a block of flash cannot be read any more.
    pub bad_sectors: u64,
    /// Of 100 disks, how many have guests that write much.
    pub heavy: u64,
    /// Of 100 known disks at a start, how many come later.
    pub absent: u64,
    /// In 1000 requests: ones that reach past the end of their disk.
    pub refusals: u64,
    /// Of 100 clean stops, how many happen while devices fail.
    pub trouble: u64,
    /// Of 100 ends of a life, how many are preceded by a stop that is called off.
    pub call_off: u64,
    /// Segments of flash that take no writes, at most.
    pub bad_places: u64,
    /// Of 100 lives, in how many the file system under flash is full at some time.
    pub full: u64,
    /// Of 100 times that flash is dead at the end of a life, how often it comes back.
    pub revival: u64,
    /// Nanoseconds a flush of flash takes besides; then flash has as few segments as it may.
    pub flash_flush_ns: u64,
    /// Flash has many segments, and guests write it over several times: a life is so long that cleaning the log
    /// has to go on.
    pub worn: bool,
    /// Write-back disks are ordered, and their origins are looked at all the time.
    pub ordered: bool,
    /// Flash devices of the pool.
    pub devices: (u64, u64),
    /// Legs of an origin; one is no mirror.
    pub legs: (u64, u64),
    /// Each of them holds the disk from the start, so that any one may fail.
    pub legs_alike: bool,
    /// In 1000 steps: something happens to the legs of a mirror.
    pub leg_trouble: u64,
    /// Of 100 crashes, how many take all flash along: another device takes its place, and only what is known beside it
    /// is left.
    pub flash_lost: u64,
    /// Of 100 starts, before how many they are changed.
    pub reshape: u64,
    /// Segments are set aside, written by somebody else, and given back.
    pub areas: bool,
    /// The pool keeps everything twice, and one device at a time gets all the trouble: no guest may notice.
    pub twice: bool,
    /// Of 100 starts, before how many a device of such a pool is replaced; while it is served as often, in a life.
    pub replace: u64,
    /// Of 100 starts, before how many something else has written the origin of a disk; 0: that is asked at no start.
    pub changed_origins: u64,
    /// Of 100 ends of a life after which origins have everything, how many put flash back to an earlier such time.
    pub older_flash: u64,
}

/// No trouble.
pub(crate) const CALM: Profile = Profile {
    name: "calm",
    about: "no trouble at all, no crash: reads return what was written",
    modes: [4, 2, 2, 1],
    homes: [1, 0, 0],
    lives: (1, 1),
    requests: (100, 500),
    crash: 0,
    origin_eio: 0,
    flash_read_eio: 0,
    flash_write_eio: 0,
    slow: 0,
    rot: 0,
    flash_death: false,
    flash_erased: false,
    change: 0,
    sector_origins: false,
    odd: true,
    hang: 0,
    flash_hang: 0,
    overdue: 0,
    verify: 33,
    sleeps: 0,
    bad_sectors: 0,
    heavy: 0,
    absent: 0,
    refusals: 2,
    trouble: 0,
    call_off: 0,
    bad_places: 0,
    full: 0,
    revival: 0,
    flash_flush_ns: 0,
    worn: false,
    ordered: false,
    devices: (1, 1),
    legs: (1, 1),
    legs_alike: false,
    leg_trouble: 0,
    flash_lost: 0,
    reshape: 0,
    areas: false,
    twice: false,
    replace: 0,
    changed_origins: 0,
    older_flash: 0,
};

/// All profiles, in the order `mixed` chooses from (with [`weights`]).
pub const PROFILES: [Profile; 46] = [
    CALM,
    Profile {
        name: "restart",
        about: "clean stops only",
        lives: (2, 5),
        requests: (40, 150),
        change: 4,
        absent: 15,
        call_off: 15,
        ..CALM
    },
    Profile {
        name: "crash",
        about: "crashes, whole disks in any mode",
        lives: (2, 6),
        requests: (20, 160),
        crash: 85,
        absent: 10,
        trouble: 20,
        call_off: 10,
        ..CALM
    },
    Profile {
        name: "write-back",
        about: "crashes, write-back only",
        modes: [1, 0, 0, 0],
        lives: (2, 6),
        requests: (20, 160),
        crash: 90,
        ..CALM
    },
    Profile {
        name: "write-through",
        about: "crashes, write-through and write-around only",
        modes: [0, 1, 1, 0],
        lives: (2, 6),
        requests: (20, 160),
        crash: 90,
        ..CALM
    },
    Profile {
        name: "change",
        about: "crashes while modes, limits, sizes and disks change",
        lives: (2, 5),
        requests: (40, 160),
        crash: 70,
        change: 40,
        absent: 10,
        trouble: 30,
        call_off: 10,
        ..CALM
    },
    Profile {
        name: "rot",
        about: "flash blocks rot (and only that: rot in the unclaimed tail of a crash looks like a torn batch)",
        lives: (1, 4),
        requests: (40, 200),
        crash: 0,
        rot: 25,
        change: 12,
        heavy: 50,
        absent: 10,
        ..CALM
    },
    Profile {
        name: "origin-errors",
        about: "origins fail, stall and crash",
        lives: (1, 4),
        requests: (40, 160),
        crash: 50,
        origin_eio: 150,
        slow: 60,
        change: 4,
        trouble: 60,
        call_off: 20,
        ..CALM
    },
    Profile {
        name: "flash-errors",
        about: "flash fails now and then, and crashes",
        lives: (1, 4),
        requests: (40, 160),
        crash: 50,
        flash_read_eio: 60,
        flash_write_eio: 60,
        slow: 60,
        trouble: 60,
        call_off: 20,
        ..CALM
    },
    Profile {
        name: "flash-death",
        about: "the flash device dies for good",
        requests: (100, 300),
        flash_death: true,
        lives: (1, 3),
        crash: 50,
        trouble: 40,
        revival: 60,
        ..CALM
    },
    Profile {
        name: "sectors",
        about: "crashes over origins that tear inside a block",
        lives: (2, 5),
        requests: (20, 160),
        crash: 90,
        sector_origins: true,
        ..CALM
    },
    Profile {
        name: "full",
        about: "many crashes of little flash whose flushes are slow: nothing comes free in time",
        modes: [6, 1, 1, 0],
        lives: (10, 40),
        requests: (1, 24),
        crash: 95,
        flash_flush_ns: 400_000_000,
        absent: 5,
        ..CALM
    },
    Profile {
        name: "full-mixed",
        about: "the file system under flash is full and gets room again, in any mode, with crashes",
        modes: [4, 2, 2, 1],
        lives: (2, 5),
        requests: (40, 160),
        crash: 50,
        change: 10,
        absent: 10,
        trouble: 40,
        call_off: 10,
        full: 60,
        ..CALM
    },
    Profile {
        name: "bad-places",
        about: "segments of flash take no writes, and crashes",
        lives: (1, 4),
        requests: (40, 160),
        crash: 50,
        change: 12,
        sleeps: 100,
        bad_sectors: 15,
        heavy: 50,
        absent: 5,
        trouble: 30,
        bad_places: 3,
        ..CALM
    },
    Profile {
        name: "death-and-refusals",
        about: "the flash device dies and comes back, disks come and go, requests are refused",
        lives: (1, 4),
        requests: (40, 200),
        crash: 40,
        flash_death: true,
        change: 15,
        absent: 25,
        refusals: 30,
        trouble: 50,
        call_off: 20,
        revival: 70,
        ..CALM
    },
    Profile {
        name: "no-room",
        about: "much is written to flash for which the file system under it has no room",
        modes: [6, 1, 1, 0],
        lives: (1, 3),
        requests: (60, 240),
        crash: 40,
        full: 100,
        origin_eio: 80,
        trouble: 30,
        ..CALM
    },
    Profile {
        name: "hanging-origins",
        about: "origins hang for long, and answer in the end",
        lives: (1, 3),
        modes: [6, 1, 1, 0],
        requests: (100, 300),
        crash: 30,
        slow: 20,
        change: 5,
        hang: 40,
        heavy: 80,
        absent: 5,
        trouble: 50,
        call_off: 10,
        ..CALM
    },
    Profile {
        name: "starved",
        about: "one crash after the other of little flash, in modes that keep intents open",
        modes: [2, 4, 1, 0],
        lives: (15, 45),
        requests: (1, 6),
        crash: 100,
        verify: 5,
        heavy: 50,
        flash_flush_ns: 400_000_000,
        ..CALM
    },
    Profile {
        name: "worn",
        about: "floods of writes to much flash that is full, in any mode, with crashes (not part of mixed: it takes long)",
        modes: [2, 2, 4, 1],
        lives: (1, 2),
        requests: (5000, 12_000),
        crash: 70,
        worn: true,
        ..CALM
    },
    Profile {
        name: "flash-only",
        about: "disks that live on flash beside others, with crashes and stops",
        homes: [2, 4, 2],
        lives: (2, 6),
        requests: (20, 160),
        crash: 70,
        change: 6,
        absent: 10,
        heavy: 30,
        trouble: 15,
        call_off: 10,
        ..CALM
    },
    Profile {
        name: "flash-only-pressed",
        about: "the same while everybody writes more than fits, and disks come and go",
        modes: [4, 1, 1, 0],
        homes: [3, 3, 1],
        lives: (2, 4),
        requests: (100, 400),
        crash: 60,
        change: 15,
        heavy: 100,
        absent: 10,
        ..CALM
    },
    Profile {
        name: "flash-only-hurt",
        about: "disks that live on flash which fails, dies and comes back",
        homes: [2, 4, 1],
        lives: (1, 4),
        requests: (40, 160),
        crash: 50,
        flash_read_eio: 40,
        flash_write_eio: 30,
        flash_death: true,
        slow: 40,
        change: 6,
        trouble: 30,
        revival: 60,
        ..CALM
    },
    Profile {
        name: "flash-only-crashed",
        about: "disks that live on flash, and one crash after the other while flushes of flash are slow",
        modes: [6, 1, 1, 0],
        homes: [2, 4, 1],
        lives: (10, 40),
        requests: (1, 24),
        crash: 95,
        flash_flush_ns: 400_000_000,
        absent: 5,
        ..CALM
    },
    Profile {
        name: "flash-only-rot",
        about: "disks that live on flash whose blocks rot or cannot be read",
        homes: [2, 4, 1],
        lives: (1, 4),
        requests: (40, 200),
        crash: 0,
        rot: 25,
        change: 12,
        heavy: 50,
        absent: 10,
        ..CALM
    },
    Profile {
        name: "devices",
        about: "two or three flash devices of unequal size, and crashes",
        modes: [4, 2, 1, 0],
        lives: (2, 6),
        requests: (20, 160),
        crash: 85,
        change: 8,
        absent: 10,
        trouble: 20,
        call_off: 10,
        devices: (2, 3),
        ..CALM
    },
    Profile {
        name: "devices-fail",
        about: "two or three flash devices that fail now and then, one of which dies or fills up, and crashes (not part of mixed)",
        modes: [4, 2, 1, 0],
        lives: (1, 4),
        requests: (40, 200),
        crash: 50,
        flash_read_eio: 40,
        flash_write_eio: 40,
        slow: 40,
        flash_death: true,
        full: 20,
        change: 8,
        trouble: 50,
        call_off: 20,
        revival: 60,
        devices: (2, 3),
        ..CALM
    },
    Profile {
        name: "mirrors",
        about: "origins of two or three legs that fail, hang, vanish and come back old, are added, removed, copied to and scrubbed; crashes",
        lives: (1, 5),
        requests: (40, 200),
        modes: [3, 3, 2, 1],
        crash: 70,
        change: 4,
        absent: 10,
        trouble: 20,
        call_off: 10,
        legs: (2, 3),
        leg_trouble: 25,
        ..CALM
    },
    Profile {
        name: "mirrors-and-flash",
        about: "the same while flash fails now and then, dies and comes back, or is lost for good",
        lives: (2, 5),
        requests: (40, 160),
        modes: [5, 3, 1, 1],
        crash: 70,
        flash_read_eio: 20,
        flash_write_eio: 20,
        flash_death: true,
        revival: 60,
        change: 4,
        trouble: 20,
        legs: (2, 3),
        leg_trouble: 15,
        flash_lost: 40,
        ..CALM
    },
    Profile {
        name: "flash-lost",
        about: "all flash is lost at crashes, and another device takes its place",
        lives: (2, 6),
        requests: (20, 160),
        crash: 85,
        change: 4,
        absent: 10,
        flash_lost: 60,
        ..CALM
    },
    Profile {
        name: "devices-flash-only",
        about: "disks that live on two or three flash devices, and others; crashes",
        modes: [4, 2, 1, 0],
        homes: [2, 4, 2],
        lives: (2, 5),
        requests: (20, 160),
        crash: 75,
        slow: 20,
        change: 8,
        absent: 10,
        heavy: 30,
        trouble: 20,
        call_off: 10,
        devices: (2, 3),
        ..CALM
    },
    Profile {
        name: "devices-change",
        about: "flash devices that come, are replaced, and are emptied and go, cut off now and then, and crashes (not part of mixed)",
        modes: [4, 2, 1, 0],
        homes: [8, 1, 0],
        lives: (3, 8),
        requests: (20, 160),
        crash: 40,
        change: 8,
        absent: 10,
        trouble: 20,
        call_off: 10,
        devices: (1, 3),
        reshape: 70,
        ..CALM
    },
    Profile {
        name: "areas",
        about: "segments that are set aside, written by somebody else and given back, and crashes (not part of mixed)",
        modes: [4, 2, 1, 0],
        homes: [8, 1, 0],
        lives: (3, 8),
        requests: (20, 200),
        crash: 60,
        slow: 10,
        change: 8,
        absent: 10,
        trouble: 20,
        call_off: 10,
        heavy: 30,
        devices: (1, 3),
        areas: true,
        ..CALM
    },
    Profile {
        name: "areas-fail",
        about: "the same while flash fails and dies (not part of mixed)",
        modes: [4, 2, 1, 0],
        lives: (3, 8),
        requests: (20, 200),
        crash: 60,
        flash_write_eio: 10,
        flash_read_eio: 10,
        flash_death: true,
        revival: 60,
        slow: 10,
        change: 8,
        trouble: 20,
        devices: (1, 3),
        areas: true,
        ..CALM
    },
    Profile {
        name: "changed-origins",
        about: "origins that something else writes while nothing serves them, flash that is older than they are, crashes (not part of mixed)",
        modes: [3, 2, 2, 0],
        lives: (3, 8),
        requests: (20, 160),
        crash: 60,
        slow: 20,
        change: 8,
        absent: 10,
        heavy: 30,
        trouble: 10,
        call_off: 10,
        changed_origins: 50,
        older_flash: 40,
        ..CALM
    },
    Profile {
        name: "ordered",
        about: "ordered disks, with crashes: what an origin alone would be after a power cut",
        modes: [1, 0, 0, 0],
        lives: (2, 5),
        requests: (60, 300),
        crash: 80,
        heavy: 30,
        trouble: 10,
        ordered: true,
        ..CALM
    },
    Profile {
        name: "ordered-changed",
        about: "ordered disks beside others whose origins fail, hang and lose power, while modes and disks change",
        modes: [4, 1, 1, 0],
        lives: (1, 4),
        requests: (60, 300),
        crash: 60,
        origin_eio: 80,
        slow: 40,
        hang: 10,
        change: 10,
        heavy: 40,
        absent: 10,
        trouble: 40,
        call_off: 15,
        ordered: true,
        ..CALM
    },
    Profile {
        name: "ordered-full",
        about: "ordered disks, and many crashes of little flash whose flushes are slow",
        modes: [6, 1, 0, 0],
        lives: (8, 30),
        requests: (1, 40),
        crash: 95,
        flash_flush_ns: 400_000_000,
        absent: 5,
        ordered: true,
        ..CALM
    },
    Profile {
        name: "ordered-rot",
        about: "ordered disks, and blocks of flash that rot and cannot be read: the rest goes on in its order",
        modes: [1, 0, 0, 0],
        lives: (1, 4),
        requests: (40, 200),
        crash: 30,
        rot: 15,
        flash_read_eio: 10,
        heavy: 30,
        change: 4,
        trouble: 10,
        ordered: true,
        ..CALM
    },
    Profile {
        name: "twice",
        about: "two to four flash devices that hold everything twice, and crashes",
        modes: [4, 2, 1, 0],
        lives: (2, 6),
        requests: (20, 160),
        crash: 85,
        change: 8,
        absent: 10,
        trouble: 20,
        call_off: 10,
        devices: (2, 4),
        twice: true,
        ..CALM
    },
    Profile {
        name: "twice-fail",
        about: "the same, and one of them fails, hangs, dies at any moment and comes back old",
        modes: [4, 2, 1, 0],
        homes: [6, 1, 0],
        lives: (2, 6),
        requests: (20, 160),
        crash: 70,
        flash_read_eio: 40,
        flash_write_eio: 20,
        slow: 40,
        flash_death: true,
        change: 6,
        trouble: 30,
        call_off: 10,
        revival: 60,
        devices: (2, 4),
        twice: true,
        ..CALM
    },
    Profile {
        name: "twice-rot",
        about: "the same, and blocks of one half rot",
        lives: (1, 4),
        requests: (40, 200),
        crash: 0,
        rot: 25,
        heavy: 50,
        devices: (2, 3),
        twice: true,
        ..CALM
    },
    Profile {
        name: "overdue",
        about: "flash and origins hang, are answered for, and do in the end what they were asked",
        lives: (1, 4),
        modes: [6, 2, 1, 1],
        requests: (100, 300),
        crash: 40,
        slow: 20,
        change: 5,
        hang: 20,
        flash_hang: 4,
        overdue: 70,
        heavy: 80,
        absent: 5,
        trouble: 60,
        call_off: 10,
        ..CALM
    },
    Profile {
        name: "twice-slow",
        about: "two or three flash devices that hold everything twice, whose flushes are slow, and one of which dies at any moment, written through, and crashes (not part of mixed)",
        modes: [1, 6, 2, 0],
        lives: (2, 6),
        requests: (40, 200),
        crash: 80,
        flash_flush_ns: 20_000_000,
        flash_death: true,
        change: 4,
        revival: 80,
        devices: (2, 3),
        twice: true,
        ..CALM
    },
    Profile {
        name: "twice-replaced",
        about: "two to four flash devices that hold everything twice, one of which fails or is lost, and is replaced, also by itself, and comes back; then it is another one's turn; crashes at any step (not part of mixed)",
        modes: [3, 3, 4, 0],
        homes: [8, 1, 0],
        lives: (3, 8),
        requests: (20, 160),
        crash: 60,
        flash_write_eio: 2,
        slow: 20,
        flash_death: true,
        change: 4,
        absent: 5,
        trouble: 20,
        revival: 60,
        devices: (2, 4),
        twice: true,
        replace: 40,
        ..CALM
    },
    Profile {
        name: "twice-rot-crash",
        about: "two or three flash devices that hold everything twice, blocks of one of which rot, and crashes (not part of mixed)",
        modes: [6, 1, 1, 0],
        lives: (2, 6),
        requests: (20, 160),
        crash: 85,
        rot: 40,
        heavy: 50,
        devices: (2, 3),
        twice: true,
        ..CALM
    },
    Profile {
        name: "erased",
        about: "the flash device is erased under the pool, in any mode, and is gone at the end of that life (not part of mixed)",
        modes: [4, 2, 2, 2],
        lives: (1, 3),
        requests: (200, 1200),
        crash: 50,
        flash_erased: true,
        flash_lost: 1,
        change: 10,
        heavy: 60,
        ..CALM
    },
];

const WEIGHTS: [u32; PROFILES.len()] = [
    6, 8, 16, 20, 16, 16, 8, 8, 6, 4, 6, 8, 6, 6, 5, 4, 6, 9, 0, 6, 5, 5, 4, 4, 0, 0, 9, 6, 5, 0,
    0, 0, 0, 0, 2, 3, 2, 3, 2, 3, 2, 0, 0, 0, 0, 0,
];

/// The name that lets the seed choose.
pub const MIXED: &str = "mixed";

impl Profile {
    /// The profile of a name; `mixed` draws one from `rng`. `None` if there is no such name.
    pub fn named(name: &str, rng: &mut Prng) -> Option<Profile> {
        if name == MIXED {
            return Some(PROFILES[rng.weighted(&WEIGHTS)].clone());
        }
        PROFILES.iter().find(|p| p.name == name).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_and_mixed_reaches_those_it_should() {
        let mut rng = Prng::new(3);
        for p in &PROFILES {
            assert_eq!(Profile::named(p.name, &mut rng).as_ref(), Some(p));
        }
        let seen: std::collections::BTreeSet<_> = (0..1000)
            .filter_map(|_| Profile::named(MIXED, &mut rng))
            .map(|p| p.name)
            .collect();
        let drawn = WEIGHTS.iter().filter(|w| **w > 0);
        assert_eq!(seen.len(), drawn.count());
        assert!(Profile::named("no such", &mut rng).is_none());
    }
}
