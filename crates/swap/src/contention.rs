//! Do pages that come back from swap wait for what else is done on the same flash?
//!
//! The kernel counts what it reads from a swap device and how long that took. What is slow on one flash is quick on another, so a
//! latency is compared with what is usual here: the lowest of late. When it is several times that for a while, whoever else uses the flash
//! and can wait should; when it is near it again, or next to nothing is read, that is over. Swap itself is never held back.

use std::path::Path;

/// What the kernel has counted of a block device since it is there (`Documentation/block/stat.rst`), and what is on its way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads that ended.
    pub reads: u64,
    /// Milliseconds that reads took, all added up.
    pub read_ms: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Reads that have not ended yet.
    pub in_flight: u64,
}

impl Counters {
    /// Of the device that is called so in `/dev`.
    pub fn of(device: &Path) -> Option<Counters> {
        // What encrypts is known by a name that links to it.
        let node = std::fs::canonicalize(device).unwrap_or_else(|_| device.to_owned());
        let name = node.file_name()?;
        let device = Path::new("/sys/class/block").join(name);
        let counted = parse(&std::fs::read_to_string(device.join("stat")).ok()?)?;
        let on_its_way = std::fs::read_to_string(device.join("inflight")).ok();
        let on_its_way = on_its_way.and_then(|text| text.split_whitespace().next()?.parse().ok());
        Some(Counters {
            in_flight: on_its_way.unwrap_or(0),
            ..counted
        })
    }
}

fn parse(stat: &str) -> Option<Counters> {
    let mut fields = [0; 8];
    let mut words = stat.split_whitespace();
    for field in &mut fields {
        *field = words.next()?.parse().ok()?;
    }
    let [reads, _, read_sectors, read_ms, _, _, written_sectors, _] = fields;
    Some(Counters {
        reads,
        read_ms,
        read_bytes: u64::saturating_mul(read_sectors, 512),
        written_bytes: u64::saturating_mul(written_sectors, 512),
        in_flight: 0,
    })
}

/// Reads of a window from which on their mean says something.
const READS_MIN: u64 = 32;
/// Of fewer, milliseconds that they took: the longer each takes, the fewer there are.
const READ_MS_MIN: u64 = 100;
/// So many times what is usual is slow, and so many times is well again.
const SLOW_TIMES: f64 = 4.0;
const WELL_TIMES: f64 = 2.0;
/// Below so many microseconds nobody is held up.
const FLOOR_US: f64 = 500.0;
/// Windows in a row until it counts as slow, and as well.
const SLOW_WINDOWS: u32 = 2;
const WELL_WINDOWS: u32 = 3;
/// What is usual rises by so much with each window: a device may become slower for good.
const FORGET: f64 = 1.01;

/// It has become slow, or is well again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Pages wait: microseconds that one takes, and usually takes.
    Slow(u64, u64),
    /// They do not any more.
    Well,
}

/// What was seen of a swap device.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    before: Option<Counters>,
    latency_us: Option<f64>,
    usual_us: Option<f64>,
    slow: bool,
    in_a_row: u32,
}

impl Watch {
    /// Looks at a window; what has changed by it.
    pub fn look(&mut self, now: Counters) -> Option<Turn> {
        let before = self.before.replace(now)?;
        let reads = now.reads.saturating_sub(before.reads);
        // It may be another device by now, which counts from zero.
        let ms = now.read_ms.saturating_sub(before.read_ms);
        if reads == 0 && now.in_flight > 0 {
            // Whoever waits for that is not well, and how long he waits is known when it ends.
            return None;
        }
        let tells = reads >= READS_MIN || reads > 0 && ms >= READ_MS_MIN;
        let told = tells.then(|| ms as f64 * 1e3 / reads as f64);
        self.latency_us = told;
        let usual = match (self.usual_us, told) {
            (Some(usual), Some(us)) => Some(us.min(usual * FORGET)),
            (usual, us) => usual.or(us),
        };
        self.usual_us = usual;
        let (us, usual) = (told.unwrap_or(0.0), usual.unwrap_or(0.0));
        let turns = match self.slow {
            false => us > (usual * SLOW_TIMES).max(FLOOR_US),
            true => us <= (usual * WELL_TIMES).max(FLOOR_US),
        };
        self.in_a_row = if turns { self.in_a_row + 1 } else { 0 };
        let wanted = if self.slow {
            WELL_WINDOWS
        } else {
            SLOW_WINDOWS
        };
        if self.in_a_row < wanted {
            return None;
        }
        self.in_a_row = 0;
        self.slow = !self.slow;
        Some(match self.slow {
            true => Turn::Slow(us as u64, usual as u64),
            false => Turn::Well,
        })
    }

    /// There is no such device any more.
    pub fn gone(&mut self) -> Option<Turn> {
        let slow = self.slow;
        *self = Watch::default();
        slow.then_some(Turn::Well)
    }

    /// Are pages held up?
    pub fn is_slow(&self) -> bool {
        self.slow
    }

    /// Microseconds that a page took in the last window, if enough came, and what is usual.
    pub fn latencies(&self) -> (Option<u64>, Option<u64>) {
        (
            self.latency_us.map(|us| us as u64),
            self.usual_us.map(|us| us as u64),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device of which is known what reading takes.
    #[derive(Default)]
    struct Source(Counters);

    impl Source {
        fn reads(&mut self, reads: u64, us: u64) -> Counters {
            self.0.reads += reads;
            self.0.read_ms += reads * us / 1000;
            self.0
        }
    }

    #[test]
    fn what_the_kernel_says_of_a_device() {
        let text = "  100 5 800 250 7 0 64 9 0 100 259 0 0 0 0\n";
        let wanted = Counters {
            reads: 100,
            read_ms: 250,
            read_bytes: 800 * 512,
            written_bytes: 64 * 512,
            in_flight: 0,
        };
        assert_eq!(parse(text), Some(wanted));
        assert_eq!(parse("1 2 3"), None);
        assert_eq!(parse("a b c d e f g h"), None);
    }

    #[test]
    fn it_is_slow_only_after_a_while_and_well_only_after_a_while() {
        let (mut watch, mut device) = (Watch::default(), Source::default());
        for _ in 0..5 {
            assert_eq!(watch.look(device.reads(1000, 200)), None);
        }
        assert_eq!(watch.latencies(), (Some(200), Some(200)));
        // Once is nothing.
        assert_eq!(watch.look(device.reads(1000, 5000)), None);
        assert_eq!(watch.look(device.reads(1000, 200)), None);
        assert_eq!(watch.look(device.reads(1000, 5000)), None);
        let turn = watch.look(device.reads(1000, 5000));
        assert!(
            matches!(turn, Some(Turn::Slow(5000, 200..=210))),
            "{turn:?}"
        );
        assert!(watch.is_slow());
        // Between well and slow it stays as it is.
        for us in [200, 200, 700, 200, 200] {
            assert_eq!(watch.look(device.reads(1000, us)), None);
        }
        assert_eq!(watch.look(device.reads(1000, 200)), Some(Turn::Well));
        assert!(!watch.is_slow());
    }

    #[test]
    fn few_reads_say_nothing_and_none_are_not_held_up() {
        let (mut watch, mut device) = (Watch::default(), Source::default());
        watch.look(device.reads(0, 0));
        watch.look(device.reads(1000, 200));
        for _ in 0..5 {
            assert_eq!(watch.look(device.reads(READS_MIN - 1, 3000)), None);
        }
        watch.look(device.reads(1000, 9000));
        assert!(watch.look(device.reads(1000, 9000)).is_some());
        let turns: Vec<_> = (0..3)
            .map(|_| watch.look(device.reads(1, 90_000)))
            .collect();
        assert_eq!(turns, [None, None, Some(Turn::Well)]);
    }

    #[test]
    fn a_flash_that_is_quick_anyway_is_never_slow() {
        let (mut watch, mut device) = (Watch::default(), Source::default());
        watch.look(device.reads(0, 0));
        watch.look(device.reads(1000, 20));
        for _ in 0..5 {
            assert_eq!(watch.look(device.reads(1000, 400)), None);
        }
    }

    #[test]
    fn with_the_device_the_waiting_ends_and_another_is_another() {
        let (mut watch, mut device) = (Watch::default(), Source::default());
        watch.look(device.reads(0, 0));
        watch.look(device.reads(1000, 200));
        watch.look(device.reads(1000, 9000));
        watch.look(device.reads(1000, 9000));
        assert_eq!(watch.gone(), Some(Turn::Well));
        assert_eq!(watch.gone(), None);
        // One that counts from zero took no time.
        watch.look(device.reads(1000, 200));
        assert_eq!(watch.look(Counters::default()), None);
    }

    /// The later pages come, the fewer come: those few count, and one that has not come is not well.
    #[test]
    fn pages_that_take_so_long_that_few_come_are_held_up() {
        let (mut watch, mut device) = (Watch::default(), Source::default());
        for _ in 0..5 {
            assert_eq!(watch.look(device.reads(1000, 200)), None);
        }
        // A few in no time say nothing.
        for _ in 0..5 {
            assert_eq!(watch.look(device.reads(3, 1000)), None);
            assert_eq!(watch.latencies().0, None);
        }
        let waits = |counted: Counters| Counters {
            in_flight: 1,
            ..counted
        };
        assert_eq!(watch.look(waits(device.reads(3, 300_000))), None);
        for _ in 0..3 {
            assert_eq!(watch.look(waits(device.reads(0, 0))), None);
        }
        let turn = watch.look(device.reads(1, 3_000_000));
        assert!(matches!(turn, Some(Turn::Slow(3_000_000, _))), "{turn:?}");
        for _ in 0..9 {
            assert_eq!(watch.look(waits(device.reads(0, 0))), None);
        }
        assert!(watch.is_slow());
        for _ in 0..2 {
            assert_eq!(watch.look(device.reads(0, 0)), None);
        }
        assert_eq!(watch.look(device.reads(0, 0)), Some(Turn::Well));
    }
}
