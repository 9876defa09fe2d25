//! Devices that have become slow: a drive that dies often answers late before it does not answer.
//!
//! What is slow depends on the device, so it is compared with itself over the day before, and with its peers:
//! devices of the same sort that work at the same time. Two of them say nothing about which is the odd one.

use std::collections::VecDeque;

use crate::model::Reason;

/// Operations below which a mean says nothing.
pub const OPS_MIN: u64 = 50;
/// So many times slower than over the day.
pub const OWN_FACTOR: f64 = 8.0;
/// So many times slower than the middle one of its peers.
pub const PEER_FACTOR: f64 = 6.0;
/// Peers that make a middle.
pub const PEERS_MIN: usize = 3;
/// Microseconds below which no origin is slow: a queue behind a burst of writes takes so long.
pub const SLOW_US: f64 = 100_000.0;
/// Microseconds below which no flash device is slow: one that cleans up in the middle of writes takes so long.
pub const FLASH_SLOW_US: f64 = 20_000.0;
/// Milliseconds of what is lately.
const LATELY_MS: u64 = 300_000;
/// Milliseconds of the day.
const DAY_MS: u64 = 86_400_000;
/// Milliseconds between two points that are kept of a day.
const POINT_MS: u64 = 60_000;

/// What is judged: of what sort of device, doing what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sort {
    /// The reason's name.
    code: &'static str,
    /// What is done, in words.
    what: &'static str,
    /// Microseconds below which nothing is slow.
    slow_us: f64,
}

/// Reads of origins.
pub const ORIGIN_READS: Sort = Sort {
    code: "slow",
    what: "reads",
    slow_us: SLOW_US,
};
/// Writes to origins.
pub const ORIGIN_WRITES: Sort = Sort {
    code: "slow-writes",
    what: "writes",
    slow_us: SLOW_US,
};
/// Reads of flash devices.
pub const FLASH_READS: Sort = Sort {
    code: "flash-slow",
    what: "reads",
    slow_us: FLASH_SLOW_US,
};
/// Writes to flash devices.
pub const FLASH_WRITES: Sort = Sort {
    code: "flash-slow-writes",
    what: "writes",
    slow_us: FLASH_SLOW_US,
};

/// How a device answered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answers {
    /// Its name.
    pub name: String,
    /// Operations lately.
    pub ops: u64,
    /// Their mean, in microseconds.
    pub mean_us: f64,
    /// Operations over the day.
    pub day_ops: u64,
    /// Their mean, in microseconds.
    pub day_mean_us: f64,
}

impl Answers {
    /// Without what happened lately, so that it does not hide itself.
    fn before(&self) -> Option<f64> {
        let ops = self.day_ops.saturating_sub(self.ops);
        let sum = self.day_mean_us * self.day_ops as f64 - self.mean_us * self.ops as f64;
        (ops >= OPS_MIN).then(|| (sum / ops as f64).max(0.0))
    }
}

/// Operations and what they took together, since something began to count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Total {
    /// Operations.
    pub ops: u64,
    /// Microseconds.
    pub us: u64,
}

/// What a device did over a day, from totals that somebody tells now and then.
#[derive(Clone, Debug, Default)]
pub struct Trail(VecDeque<(u64, Total)>);

impl Trail {
    /// The total at a time of a clock that never jumps, in milliseconds. One that is less than before has begun anew.
    pub fn add(&mut self, at: u64, total: Total) {
        let newest = self.0.back().copied();
        if newest.is_some_and(|(_, last)| total.ops < last.ops || total.us < last.us) {
            self.0.clear();
        }
        // The newest always, and of those before it one a minute.
        let close = |i: usize| self.0.get(i).map(|(at, _)| *at);
        if let [Some(before), Some(_)] = [
            self.0.len().checked_sub(2).and_then(close),
            self.0.len().checked_sub(1).and_then(close),
        ] && at.saturating_sub(before) < POINT_MS
        {
            self.0.pop_back();
        }
        self.0.push_back((at, total));
        while (self.0.front()).is_some_and(|(then, _)| at.saturating_sub(*then) > DAY_MS) {
            self.0.pop_front();
        }
    }

    /// How the device of this name answered.
    pub fn answers(&self, name: &str) -> Answers {
        let Some((at, newest)) = self.0.back().copied() else {
            return Answers::default();
        };
        let since = |span: u64| {
            let first = (self.0.iter()).find(|(then, _)| at.saturating_sub(*then) <= span);
            let then = first.map_or(newest, |(_, total)| *total);
            let ops = newest.ops.saturating_sub(then.ops);
            let us = newest.us.saturating_sub(then.us);
            (ops, us as f64 / ops.max(1) as f64)
        };
        let ((ops, mean_us), (day_ops, day_mean_us)) = (since(LATELY_MS), since(DAY_MS));
        Answers {
            name: name.to_owned(),
            ops,
            mean_us,
            day_ops,
            day_mean_us,
        }
    }
}

/// Adds what is to be said of a flash device to what is said of others, one sentence for each code: who is told, is
/// told once of each.
pub fn join(reasons: &mut Vec<Reason>, device: &str, said: Vec<Reason>) {
    for mut reason in said {
        reason.what = format!("{device}: {}", reason.what);
        match reasons.iter_mut().find(|r| r.code == reason.code) {
            Some(there) => there.what = format!("{}; {}", there.what, reason.what),
            None => reasons.push(reason),
        }
    }
}

/// What is to be said of `one`, among all devices of its sort.
pub fn judge(sort: Sort, one: &Answers, all: &[Answers]) -> Vec<Reason> {
    if one.ops < OPS_MIN || one.mean_us < sort.slow_us {
        return Vec::new();
    }
    let ms = one.mean_us / 1000.0;
    let mut peers: Vec<f64> = (all.iter())
        .filter(|p| p.name != one.name && p.ops >= OPS_MIN)
        .map(|p| p.mean_us)
        .collect();
    peers.sort_by(f64::total_cmp);
    let middle = peers
        .get(peers.len() / 2)
        .copied()
        .filter(|_| peers.len() >= PEERS_MIN);
    let slow = |than: String| {
        Reason::degraded(
            sort.code,
            format!("{} take {ms:.0} ms, {than}", sort.what),
            "see the kernel's log for resets and errors, and what else uses the device",
        )
    };
    let own = one
        .before()
        .filter(|before| one.mean_us >= before * OWN_FACTOR);
    if let Some(before) = own {
        return vec![slow(format!(
            "and took {:.1} ms over the day",
            before / 1000.0
        ))];
    }
    let odd = middle.filter(|middle| one.mean_us >= middle * PEER_FACTOR);
    odd.map(|middle| {
        slow(format!(
            "while others of its sort take {:.1} ms",
            middle / 1000.0
        ))
    })
    .into_iter()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(name: &str, mean_us: f64, day_mean_us: f64) -> Answers {
        Answers {
            name: name.to_owned(),
            ops: 100,
            mean_us,
            day_ops: 10_000,
            day_mean_us,
        }
    }

    #[test]
    fn slow_is_compared_with_itself_and_with_others() {
        let dying = answers("a", 400_000.0, 12_000.0);
        let said = judge(ORIGIN_READS, &dying, std::slice::from_ref(&dying));
        assert!(said[0].what.contains("400 ms, and took 8.1 ms"), "{said:?}");
        // Always slow: only its peers can tell.
        let slow = answers("a", 400_000.0, 400_000.0);
        let mut all = vec![
            slow.clone(),
            answers("b", 9_000.0, 9_000.0),
            answers("c", 9_000.0, 9_000.0),
        ];
        assert_eq!(
            judge(ORIGIN_READS, &slow, &all),
            [],
            "two peers have no middle"
        );
        all.push(answers("d", 11_000.0, 9_000.0));
        assert!(judge(ORIGIN_READS, &slow, &all)[0].what.contains("others"));
        assert_eq!(judge(ORIGIN_READS, &all[3], &all), []);
    }

    #[test]
    fn fast_and_idle_devices_are_left_alone() {
        let fast = answers("a", 900.0, 10.0);
        assert_eq!(judge(ORIGIN_READS, &fast, &[]), []);
        let idle = Answers {
            ops: 3,
            ..answers("a", 900_000.0, 10.0)
        };
        assert_eq!(judge(ORIGIN_READS, &idle, &[]), []);
    }

    #[test]
    fn what_is_slow_depends_on_what_it_is() {
        let late = answers("a", 30_000.0, 300.0);
        assert_eq!(judge(ORIGIN_WRITES, &late, &[]), []);
        let said = judge(FLASH_WRITES, &late, &[]);
        assert_eq!(said[0].code, "flash-slow-writes");
        assert!(said[0].what.starts_with("writes take 30 ms"), "{said:?}");
        let late = answers("a", 300_000.0, 4_000.0);
        assert_eq!(judge(ORIGIN_WRITES, &late, &[])[0].code, "slow-writes");
    }

    #[test]
    fn two_devices_are_one_reason() {
        let mut reasons = Vec::new();
        for (device, ms) in [("/dev/a", 30_000.0), ("/dev/b", 40_000.0)] {
            let said = judge(FLASH_READS, &answers(device, ms, 300.0), &[]);
            join(&mut reasons, device, said);
        }
        assert_eq!(reasons.len(), 1);
        let what = &reasons[0].what;
        assert!(what.contains("/dev/a: reads take 30 ms"), "{what}");
        assert!(what.contains("/dev/b: reads take 40 ms"), "{what}");
    }

    /// A device that takes `us` for each of ten operations, told every five seconds, from `from` for so long.
    fn work(trail: &mut Trail, total: &mut Total, from: u64, ms: u64, us: u64) {
        for at in (from..from + ms).step_by(5_000) {
            total.ops += 10;
            total.us += 10 * us;
            trail.add(at, *total);
        }
    }

    #[test]
    fn totals_become_lately_and_the_day() {
        let (mut trail, mut total) = (Trail::default(), Total::default());
        let hour = 3_600_000;
        work(&mut trail, &mut total, 0, 20 * hour, 200);
        assert_eq!(judge(FLASH_READS, &trail.answers("a"), &[]), []);
        work(&mut trail, &mut total, 20 * hour, LATELY_MS, 50_000);
        let now = trail.answers("a");
        assert!((500..=620).contains(&now.ops), "{now:?}");
        assert!(now.mean_us > 45_000.0, "{now:?}");
        let said = judge(FLASH_READS, &now, &[]);
        assert!(
            said[0].what.contains("and took 0.2 ms over the day"),
            "{said:?}"
        );
        // A day of points, and no more.
        work(
            &mut trail,
            &mut total,
            20 * hour + LATELY_MS,
            60 * hour,
            200,
        );
        assert!(trail.0.len() <= 1_600, "{}", trail.0.len());
        assert_eq!(judge(FLASH_READS, &trail.answers("a"), &[]), []);
        // The daemon was started again: nothing of before is subtracted.
        trail.add(81 * hour, Total { ops: 100, us: 200 });
        assert_eq!(trail.answers("a").ops, 0);
    }
}
